#!/bin/bash
cd /app && sort -u doors.dat | wc -l > answer.txt
