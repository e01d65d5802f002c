#!/bin/bash
cd /app && sort -u trees.log | wc -l > answer.txt
