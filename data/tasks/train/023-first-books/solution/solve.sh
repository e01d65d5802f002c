#!/bin/bash
cd /app && head -n 1 books.log > answer.txt
