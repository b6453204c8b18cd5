#!/bin/bash
# Rename the file lake.txt to river.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e lake.txt ] && [ -f river.txt ] && [ "$(cat river.txt)" = "cold water" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
