#!/bin/bash
cd /app && tail -n 1 birds.log > answer.txt
