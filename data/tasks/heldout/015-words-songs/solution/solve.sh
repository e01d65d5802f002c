#!/bin/bash
cd /app && wc -w < songs.txt > answer.txt
