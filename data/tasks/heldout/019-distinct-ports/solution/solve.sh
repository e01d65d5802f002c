#!/bin/bash
cd /app && sort -u ports.csv | wc -l > answer.txt
