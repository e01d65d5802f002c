#!/bin/bash
cd /app && sort -u books.csv | wc -l > answer.txt
