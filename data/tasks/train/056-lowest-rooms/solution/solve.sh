#!/bin/bash
cd /app && sort rooms.txt | head -n 1 > answer.txt
