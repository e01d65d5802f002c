#!/bin/bash
cd /app && sort -u rooms.txt | wc -l > answer.txt
