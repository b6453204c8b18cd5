#!/bin/bash
# Move the file bread.txt into the folder kitchen.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ ! -e bread.txt ] && [ -f kitchen/bread.txt ] && [ "$(cat kitchen/bread.txt)" = "fresh" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
