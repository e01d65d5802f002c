#!/bin/bash
cd /app && wc -l < books.dat > answer.txt
