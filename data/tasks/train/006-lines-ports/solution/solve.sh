#!/bin/bash
cd /app && wc -l < ports.txt > answer.txt
