#!/bin/bash
cd /app && sort -u books.log | wc -l > answer.txt
