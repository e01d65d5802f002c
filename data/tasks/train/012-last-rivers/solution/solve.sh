#!/bin/bash
cd /app && tail -n 1 rivers.csv > answer.txt
