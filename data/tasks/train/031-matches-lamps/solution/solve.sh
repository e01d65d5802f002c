#!/bin/bash
cd /app && grep -c blue lamps.dat > answer.txt
