#!/bin/bash
cd /app && grep -c white trees.log > answer.txt
