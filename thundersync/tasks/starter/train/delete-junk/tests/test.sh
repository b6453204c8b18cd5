#!/bin/bash
# Delete the file junk.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f gold.txt ] && [ "$(cat gold.txt)" = "text of gold" ]; } || exit 0

if [ ! -e junk.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
