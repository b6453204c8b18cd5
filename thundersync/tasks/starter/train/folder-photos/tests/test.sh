#!/bin/bash
# Create a folder named photos.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -d photos ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
