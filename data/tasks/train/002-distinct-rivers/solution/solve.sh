#!/bin/bash
cd /app && sort -u rivers.dat | wc -l > answer.txt
