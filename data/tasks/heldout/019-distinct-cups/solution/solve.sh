#!/bin/bash
cd /app && sort -u cups.csv | wc -l > answer.txt
