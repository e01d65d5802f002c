#!/bin/bash
cd /app && sort coins.dat | head -n 1 > answer.txt
