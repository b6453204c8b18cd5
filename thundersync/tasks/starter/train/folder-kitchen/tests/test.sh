#!/bin/bash
# Create the directory kitchen.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -d kitchen ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
