#!/bin/bash
cd /app && head -n 1 coins.log > answer.txt
