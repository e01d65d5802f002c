#!/bin/bash
cd /app && head -n 1 stock.csv > answer.txt
