#!/bin/bash
# Write the word horse to animal.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f animal.txt ] && [ "$(cat animal.txt)" = "horse" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
