#!/bin/bash
cd /app && sort -u trees.txt | wc -l > answer.txt
