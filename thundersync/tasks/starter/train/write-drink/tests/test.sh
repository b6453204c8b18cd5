#!/bin/bash
# Write the word coffee to drink.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f drink.txt ] && [ "$(cat drink.txt)" = "coffee" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
