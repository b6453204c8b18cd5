#!/bin/bash
# Write the word cat to pet.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f pet.txt ] && [ "$(cat pet.txt)" = "cat" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
