#!/bin/bash
cd /app && sort -u stock.dat | wc -l > answer.txt
