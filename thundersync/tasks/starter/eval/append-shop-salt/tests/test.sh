#!/bin/bash
# Add the line salt to the end of shop.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ -f shop.txt ] && [ "$(cat shop.txt)" = $'pepper\nsalt' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
