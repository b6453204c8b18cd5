#!/bin/bash
# Write yes to first.txt and no to second.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

met=0
if [ -f first.txt ] && [ "$(cat first.txt)" = "yes" ]; then met=$((met + 1)); fi
if [ -f second.txt ] && [ "$(cat second.txt)" = "no" ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
