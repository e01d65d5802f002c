#!/bin/bash
cd /app && tail -n 1 stock.dat > answer.txt
