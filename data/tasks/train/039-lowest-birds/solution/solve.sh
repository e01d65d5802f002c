#!/bin/bash
cd /app && sort birds.txt | head -n 1 > answer.txt
