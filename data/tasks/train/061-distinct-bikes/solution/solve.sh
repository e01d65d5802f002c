#!/bin/bash
cd /app && sort -u bikes.csv | wc -l > answer.txt
