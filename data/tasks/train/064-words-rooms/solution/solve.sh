#!/bin/bash
cd /app && wc -w < rooms.log > answer.txt
