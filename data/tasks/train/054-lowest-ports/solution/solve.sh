#!/bin/bash
cd /app && sort ports.txt | head -n 1 > answer.txt
