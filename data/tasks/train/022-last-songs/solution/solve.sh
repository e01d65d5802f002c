#!/bin/bash
cd /app && tail -n 1 songs.txt > answer.txt
