#!/bin/bash
# Remove the file draft.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f final.txt ] && [ "$(cat final.txt)" = "text of final" ]; } || exit 0

if [ ! -e draft.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
