#!/bin/bash
cd /app && wc -w < trees.txt > answer.txt
