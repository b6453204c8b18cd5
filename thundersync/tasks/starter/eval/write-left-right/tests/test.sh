#!/bin/bash
# Write tea to left.txt and milk to right.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

met=0
if [ -f left.txt ] && [ "$(cat left.txt)" = "tea" ]; then met=$((met + 1)); fi
if [ -f right.txt ] && [ "$(cat right.txt)" = "milk" ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
