#!/bin/bash
cd /app && sort doors.dat | head -n 1 > answer.txt
