#!/bin/bash
# Rename the file lion.txt to tiger.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e lion.txt ] && [ -f tiger.txt ] && [ "$(cat tiger.txt)" = "stripes" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
