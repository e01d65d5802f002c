#!/bin/bash
cd /app && grep -c blue bells.csv > answer.txt
