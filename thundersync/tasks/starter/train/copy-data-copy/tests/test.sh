#!/bin/bash
# Copy the file data.txt to copy.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f data.txt ] && [ "$(cat data.txt)" = "1 2 3" ]; } || exit 0

if [ -f copy.txt ] && [ "$(cat copy.txt)" = "1 2 3" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
