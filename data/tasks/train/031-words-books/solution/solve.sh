#!/bin/bash
cd /app && wc -w < books.csv > answer.txt
