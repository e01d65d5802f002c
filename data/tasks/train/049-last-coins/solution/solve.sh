#!/bin/bash
cd /app && tail -n 1 coins.txt > answer.txt
