#!/bin/bash
# Touch the file notes.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f notes.txt ] && [ ! -s notes.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
