#!/bin/bash
cd /app && wc -w < ports.csv > answer.txt
