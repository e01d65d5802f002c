#!/bin/bash
cd /app && wc -l < birds.log > answer.txt
