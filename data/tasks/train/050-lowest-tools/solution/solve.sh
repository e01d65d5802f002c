#!/bin/bash
cd /app && sort tools.txt | head -n 1 > answer.txt
