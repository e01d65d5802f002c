#!/bin/bash
cd /app && wc -w < trees.log > answer.txt
