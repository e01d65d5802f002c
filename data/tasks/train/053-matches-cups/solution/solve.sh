#!/bin/bash
cd /app && grep -c white cups.txt > answer.txt
