#!/bin/bash
cd /app && sort stars.log | head -n 1 > answer.txt
