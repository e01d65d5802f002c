#!/bin/bash
cd /app && sort tools.dat | head -n 1 > answer.txt
