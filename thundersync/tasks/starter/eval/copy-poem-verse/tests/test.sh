#!/bin/bash
# Use cp to copy poem.txt to verse.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f poem.txt ] && [ "$(cat poem.txt)" = "roses" ]; } || exit 0

if [ -f verse.txt ] && [ "$(cat verse.txt)" = "roses" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
