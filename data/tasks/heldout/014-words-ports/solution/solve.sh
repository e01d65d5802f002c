#!/bin/bash
cd /app && wc -w < ports.txt > answer.txt
