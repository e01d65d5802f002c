#!/bin/bash
cd /app && wc -w < songs.csv > answer.txt
