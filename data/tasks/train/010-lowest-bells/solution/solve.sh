#!/bin/bash
cd /app && sort bells.txt | head -n 1 > answer.txt
