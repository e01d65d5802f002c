#!/bin/bash
cd /app && head -n 1 ports.txt > answer.txt
