#!/bin/bash
cd /app && wc -l < birds.dat > answer.txt
