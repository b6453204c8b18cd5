#!/bin/bash
# Remove the file old.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f new.txt ] && [ "$(cat new.txt)" = "text of new" ]; } || exit 0

if [ ! -e old.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
