#!/bin/bash
cd /app && tail -n 1 birds.txt > answer.txt
