#!/bin/bash
# Write the word green to color.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f color.txt ] && [ "$(cat color.txt)" = "green" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
