#!/bin/bash
cd /app && sort maps.dat | head -n 1 > answer.txt
