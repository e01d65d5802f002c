#!/bin/bash
cd /app && sort ports.log | head -n 1 > answer.txt
