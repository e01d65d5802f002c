#!/bin/bash
cd /app && wc -l < ports.csv > answer.txt
