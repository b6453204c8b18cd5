#!/bin/bash
# Append the word milk to list.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f list.txt ] && [ "$(cat list.txt)" = $'eggs\nmilk' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
