#!/bin/bash
cd /app && wc -l < rooms.log > answer.txt
