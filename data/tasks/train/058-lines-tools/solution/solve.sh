#!/bin/bash
cd /app && wc -l < tools.txt > answer.txt
