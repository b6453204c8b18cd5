#!/bin/bash
# Append the word done to log.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ -f log.txt ] && [ "$(cat log.txt)" = $'started\ndone' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
