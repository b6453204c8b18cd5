#!/bin/bash
# Copy the file song.txt to tune.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f song.txt ] && [ "$(cat song.txt)" = "la la la" ]; } || exit 0

if [ -f tune.txt ] && [ "$(cat tune.txt)" = "la la la" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
