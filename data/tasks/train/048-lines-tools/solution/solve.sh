#!/bin/bash
cd /app && wc -l < tools.csv > answer.txt
