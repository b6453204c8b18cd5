#!/bin/bash
# Write the word winter to season.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f season.txt ] && [ "$(cat season.txt)" = "winter" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
