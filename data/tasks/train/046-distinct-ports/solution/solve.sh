#!/bin/bash
cd /app && sort -u ports.txt | wc -l > answer.txt
