#!/bin/bash
cd /app && sort -u stock.csv | wc -l > answer.txt
