#!/bin/bash
# Create a folder named backup.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -d backup ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
