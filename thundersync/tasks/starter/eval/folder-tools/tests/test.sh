#!/bin/bash
# Create a directory named tools.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -d tools ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
