#!/bin/bash
cd /app && sort -u tools.log | wc -l > answer.txt
