#!/bin/bash
cd /app && wc -l < stock.csv > answer.txt
