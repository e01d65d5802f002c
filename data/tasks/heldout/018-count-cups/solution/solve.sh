#!/bin/bash
cd /app && wc -l < cups.txt > answer.txt
