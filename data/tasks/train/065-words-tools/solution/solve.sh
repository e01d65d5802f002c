#!/bin/bash
cd /app && wc -w < tools.csv > answer.txt
