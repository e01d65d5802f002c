#!/bin/bash
cd /app && head -n 1 lamps.dat > answer.txt
