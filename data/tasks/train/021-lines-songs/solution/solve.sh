#!/bin/bash
cd /app && wc -l < songs.dat > answer.txt
