#!/bin/bash
# Create an empty file named blank.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ -f blank.txt ] && [ ! -s blank.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
