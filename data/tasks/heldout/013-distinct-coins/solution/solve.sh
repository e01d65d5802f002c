#!/bin/bash
cd /app && sort -u coins.log | wc -l > answer.txt
