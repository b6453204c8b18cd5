#!/bin/bash
# Rename wolf.txt to bear.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e wolf.txt ] && [ -f bear.txt ] && [ "$(cat bear.txt)" = "grey fur" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
