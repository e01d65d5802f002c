#!/bin/bash
cd /app && sort songs.log | head -n 1 > answer.txt
