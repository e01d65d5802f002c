#!/bin/bash
cd /app && grep -c gold stars.dat > answer.txt
