#!/bin/bash
cd /app && wc -w < stock.log > answer.txt
