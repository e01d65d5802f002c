#!/bin/bash
cd /app && sort -u ports.dat | wc -l > answer.txt
