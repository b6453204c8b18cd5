#!/bin/bash
# Write the word monday to day.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f day.txt ] && [ "$(cat day.txt)" = "monday" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
