#!/bin/bash
cd /app && head -n 1 songs.dat > answer.txt
