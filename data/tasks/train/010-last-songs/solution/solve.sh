#!/bin/bash
cd /app && tail -n 1 songs.log > answer.txt
