#!/bin/bash
cd /app && wc -l < coins.csv > answer.txt
