#!/bin/bash
cd /app && tail -n 1 bikes.log > answer.txt
