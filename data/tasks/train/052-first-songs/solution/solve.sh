#!/bin/bash
cd /app && head -n 1 songs.txt > answer.txt
