#!/bin/bash
cd /app && sort stock.dat | head -n 1 > answer.txt
