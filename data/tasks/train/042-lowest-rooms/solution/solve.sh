#!/bin/bash
cd /app && sort rooms.log | head -n 1 > answer.txt
