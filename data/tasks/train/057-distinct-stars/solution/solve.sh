#!/bin/bash
cd /app && sort -u stars.txt | wc -l > answer.txt
