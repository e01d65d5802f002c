#!/bin/bash
cd /app && wc -l < birds.txt > answer.txt
