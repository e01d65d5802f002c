#!/bin/bash
cd /app && sort ports.csv | head -n 1 > answer.txt
