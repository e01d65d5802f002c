#!/bin/bash
cd /app && wc -l < trees.txt > answer.txt
