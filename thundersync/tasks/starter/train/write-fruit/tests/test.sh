#!/bin/bash
# Write the word apple to fruit.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f fruit.txt ] && [ "$(cat fruit.txt)" = "apple" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
