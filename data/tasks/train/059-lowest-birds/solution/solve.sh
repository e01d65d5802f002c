#!/bin/bash
cd /app && sort birds.csv | head -n 1 > answer.txt
