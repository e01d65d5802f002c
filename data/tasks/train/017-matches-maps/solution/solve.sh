#!/bin/bash
cd /app && grep -c blue maps.txt > answer.txt
