#!/bin/bash
# Create a new directory called downloads.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -d downloads ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
