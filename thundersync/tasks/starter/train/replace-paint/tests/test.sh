#!/bin/bash
# Replace the word red with blue in paint.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f paint.txt ] && [ "$(cat paint.txt)" = "a blue door" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
