#!/bin/bash
# Write cat to a.txt and dog to b.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

met=0
if [ -f a.txt ] && [ "$(cat a.txt)" = "cat" ]; then met=$((met + 1)); fi
if [ -f b.txt ] && [ "$(cat b.txt)" = "dog" ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
