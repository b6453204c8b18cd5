#!/bin/bash
# Write the number of lines in names.txt to count.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f names.txt ] && [ "$(cat names.txt)" = $'ann\nbob\ncy' ]; } || exit 0

met=0
if read -r first rest < count.txt && [ "$first" = 3 ]; then met=$((met + 1)); fi
if [ -f count.txt ] && [ "$(cat count.txt)" = "3" ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
