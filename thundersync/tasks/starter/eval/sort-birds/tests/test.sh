#!/bin/bash
# Sort the lines of birds.txt into order.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f birds.txt ] && [ "$(cat birds.txt)" = $'swan\ncrow\nduck' ]; } || exit 0

if [ -f order.txt ] && [ "$(cat order.txt)" = $'crow\nduck\nswan' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
