#!/bin/bash
cd /app && sort shirts.txt | head -n 1 > answer.txt
