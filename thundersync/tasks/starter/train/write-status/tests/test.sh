#!/bin/bash
# Write the word done to status.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f status.txt ] && [ "$(cat status.txt)" = "done" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
