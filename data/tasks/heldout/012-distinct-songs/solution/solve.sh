#!/bin/bash
cd /app && sort -u songs.log | wc -l > answer.txt
