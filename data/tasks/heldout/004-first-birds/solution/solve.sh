#!/bin/bash
cd /app && head -n 1 birds.log > answer.txt
