#!/bin/bash
cd /app && tail -n 1 books.log > answer.txt
