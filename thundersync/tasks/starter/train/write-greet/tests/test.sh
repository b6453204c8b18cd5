#!/bin/bash
# Write good morning to greet.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ -f greet.txt ] && [ "$(cat greet.txt)" = "good morning" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
