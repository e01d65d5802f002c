#!/bin/bash
cd /app && wc -w < tools.txt > answer.txt
