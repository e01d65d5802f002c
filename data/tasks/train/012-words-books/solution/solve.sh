#!/bin/bash
cd /app && wc -w < books.txt > answer.txt
