#!/bin/bash
# Rename the file apple.txt to pear.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e apple.txt ] && [ -f pear.txt ] && [ "$(cat pear.txt)" = "sweet" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
