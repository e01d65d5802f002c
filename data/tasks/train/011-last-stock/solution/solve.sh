#!/bin/bash
cd /app && tail -n 1 stock.txt > answer.txt
