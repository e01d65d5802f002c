#!/bin/bash
cd /app && sort bikes.dat | head -n 1 > answer.txt
