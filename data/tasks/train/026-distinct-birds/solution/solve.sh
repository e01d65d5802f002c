#!/bin/bash
cd /app && sort -u birds.log | wc -l > answer.txt
