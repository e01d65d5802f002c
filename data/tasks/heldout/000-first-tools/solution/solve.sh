#!/bin/bash
cd /app && head -n 1 tools.dat > answer.txt
