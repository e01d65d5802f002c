#!/bin/bash
cd /app && grep -c black doors.txt > answer.txt
