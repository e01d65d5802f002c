#!/bin/bash
cd /app && sort songs.csv | head -n 1 > answer.txt
