#!/bin/bash
cd /app && grep -c green books.log > answer.txt
