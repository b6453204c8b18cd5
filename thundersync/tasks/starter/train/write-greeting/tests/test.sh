#!/bin/bash
# Write the words good morning to greeting.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f greeting.txt ] && [ "$(cat greeting.txt)" = "good morning" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
