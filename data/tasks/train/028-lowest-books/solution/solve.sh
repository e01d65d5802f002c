#!/bin/bash
cd /app && sort books.dat | head -n 1 > answer.txt
