#!/bin/bash
cd /app && head -n 1 stock.dat > answer.txt
