#!/bin/bash
cd /app && sort -u songs.dat | wc -l > answer.txt
