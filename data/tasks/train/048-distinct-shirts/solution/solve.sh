#!/bin/bash
cd /app && sort -u shirts.txt | wc -l > answer.txt
