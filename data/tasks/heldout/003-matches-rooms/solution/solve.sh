#!/bin/bash
cd /app && grep -c black rooms.txt > answer.txt
