#!/bin/bash
cd /app && sort songs.dat | head -n 1 > answer.txt
