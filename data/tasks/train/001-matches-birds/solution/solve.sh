#!/bin/bash
cd /app && grep -c white birds.txt > answer.txt
