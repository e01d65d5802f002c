#!/bin/bash
cd /app && sort trees.txt | head -n 1 > answer.txt
