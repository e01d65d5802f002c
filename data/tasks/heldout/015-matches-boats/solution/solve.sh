#!/bin/bash
cd /app && grep -c gold boats.log > answer.txt
