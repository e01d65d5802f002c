#!/bin/bash
cd /app && wc -l < stars.txt > answer.txt
