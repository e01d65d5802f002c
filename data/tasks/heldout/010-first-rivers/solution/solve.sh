#!/bin/bash
cd /app && head -n 1 rivers.log > answer.txt
