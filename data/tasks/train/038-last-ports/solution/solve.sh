#!/bin/bash
cd /app && tail -n 1 ports.log > answer.txt
