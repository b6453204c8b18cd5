#!/bin/bash
# Make a new directory called videos.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ -d videos ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
