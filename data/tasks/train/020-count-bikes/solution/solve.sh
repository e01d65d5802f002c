#!/bin/bash
cd /app && wc -l < bikes.log > answer.txt
