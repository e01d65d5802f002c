#!/bin/bash
cd /app && sort trees.log | head -n 1 > answer.txt
