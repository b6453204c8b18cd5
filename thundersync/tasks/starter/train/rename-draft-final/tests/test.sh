#!/bin/bash
# Rename the file draft.txt to final.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e draft.txt ] && [ -f final.txt ] && [ "$(cat final.txt)" = "dear reader" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
