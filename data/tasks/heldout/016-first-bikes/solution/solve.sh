#!/bin/bash
cd /app && head -n 1 bikes.dat > answer.txt
