#!/bin/bash
cd /app && sort boats.txt | head -n 1 > answer.txt
