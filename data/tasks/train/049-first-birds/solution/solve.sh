#!/bin/bash
cd /app && head -n 1 birds.dat > answer.txt
