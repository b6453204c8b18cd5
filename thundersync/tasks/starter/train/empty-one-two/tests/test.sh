#!/bin/bash
# Create the empty files one.txt and two.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

met=0
if [ -f one.txt ] && [ ! -s one.txt ]; then met=$((met + 1)); fi
if [ -f two.txt ] && [ ! -s two.txt ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
