#!/bin/bash
cd /app && sort -u songs.csv | wc -l > answer.txt
