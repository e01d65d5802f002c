#!/bin/bash
cd /app && sort -u lamps.txt | wc -l > answer.txt
