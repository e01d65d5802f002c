#!/bin/bash
cd /app && grep -c blue ports.dat > answer.txt
