#!/bin/bash
# Copy the file a.txt to b.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f a.txt ] && [ "$(cat a.txt)" = "1 2 3" ]; } || exit 0

if [ -f b.txt ] && [ "$(cat b.txt)" = "1 2 3" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
