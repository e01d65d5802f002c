#!/bin/bash
cd /app && sort -u tools.csv | wc -l > answer.txt
