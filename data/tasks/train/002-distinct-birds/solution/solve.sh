#!/bin/bash
cd /app && sort -u birds.txt | wc -l > answer.txt
