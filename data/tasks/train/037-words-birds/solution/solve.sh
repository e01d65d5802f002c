#!/bin/bash
cd /app && wc -w < birds.log > answer.txt
