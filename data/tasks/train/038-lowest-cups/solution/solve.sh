#!/bin/bash
cd /app && sort cups.txt | head -n 1 > answer.txt
