#!/bin/bash
cd /app && wc -w < stock.dat > answer.txt
