#!/bin/bash
cd /app && wc -l < stock.log > answer.txt
