#!/bin/bash
cd /app && sort stock.log | head -n 1 > answer.txt
