#!/bin/bash
cd /app && tail -n 1 ports.txt > answer.txt
