#!/bin/bash
# Delete the file wrong.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f right.txt ] && [ "$(cat right.txt)" = "text of right" ]; } || exit 0

if [ ! -e wrong.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
