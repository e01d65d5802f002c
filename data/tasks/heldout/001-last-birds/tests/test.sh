#!/bin/bash
# Reward 1 when /app/answer.txt is a regular file whose only line is the expected one, else 0.
reward=0
expected=(); answer=()
mapfile -t expected < /tests/expected.txt
if [[ -f /app/answer.txt && ! -L /app/answer.txt ]]; then
  mapfile -t answer < /app/answer.txt
  if [[ ${#answer[@]} -eq 1 && "${answer[0]}" == "${expected[0]}" ]]; then
    reward=1
  fi
fi
echo "$reward" > /logs/verifier/reward.txt
