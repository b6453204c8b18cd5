#!/bin/bash
# Remove the file trash.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f store.txt ] && [ "$(cat store.txt)" = "text of store" ]; } || exit 0

if [ ! -e trash.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
