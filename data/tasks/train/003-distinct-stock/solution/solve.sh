#!/bin/bash
cd /app && sort -u stock.log | wc -l > answer.txt
