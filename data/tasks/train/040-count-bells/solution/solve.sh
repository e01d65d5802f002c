#!/bin/bash
cd /app && wc -l < bells.txt > answer.txt
