#!/bin/bash
cd /app && wc -l < ports.log > answer.txt
