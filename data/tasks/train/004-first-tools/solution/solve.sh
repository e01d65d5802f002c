#!/bin/bash
cd /app && head -n 1 tools.txt > answer.txt
