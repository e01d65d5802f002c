#!/bin/bash
cd /app && sort books.log | head -n 1 > answer.txt
