#!/bin/bash
cd /app && wc -l < songs.log > answer.txt
