#!/bin/bash
cd /app && grep -c pink tools.txt > answer.txt
