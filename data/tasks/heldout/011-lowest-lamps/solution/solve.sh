#!/bin/bash
cd /app && sort lamps.txt | head -n 1 > answer.txt
