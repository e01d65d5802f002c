#!/bin/bash
cd /app && sort -u boats.txt | wc -l > answer.txt
