#!/bin/bash
# Remove both cache.txt and trash.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f store.txt ] && [ "$(cat store.txt)" = "text of store" ]; } || exit 0

met=0
if [ ! -e cache.txt ]; then met=$((met + 1)); fi
if [ ! -e trash.txt ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
