#!/bin/bash
cd /app && wc -w < birds.csv > answer.txt
