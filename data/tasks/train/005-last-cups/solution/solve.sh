#!/bin/bash
cd /app && tail -n 1 cups.txt > answer.txt
