#!/bin/bash
# Sort words.txt into sorted.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f words.txt ] && [ "$(cat words.txt)" = $'pear\nfig\nkiwi\napple' ]; } || exit 0

if [ -f sorted.txt ] && [ "$(cat sorted.txt)" = $'apple\nfig\nkiwi\npear' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
