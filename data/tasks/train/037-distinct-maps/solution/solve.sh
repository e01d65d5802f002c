#!/bin/bash
cd /app && sort -u maps.txt | wc -l > answer.txt
