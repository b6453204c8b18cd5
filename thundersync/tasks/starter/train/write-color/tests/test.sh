#!/bin/bash
# Create a file named color.txt with the text green.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ -f color.txt ] && [ "$(cat color.txt)" = "green" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
