#!/bin/bash
# Create a directory named music.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -d music ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
