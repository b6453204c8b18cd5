#!/bin/bash
# Count the lines of rows.txt and save the number in total.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f rows.txt ] && [ "$(cat rows.txt)" = $'a\nb\nc\nd\ne\nf\ng' ]; } || exit 0

met=0
if read -r first rest < total.txt && [ "$first" = 7 ]; then met=$((met + 1)); fi
if [ "$(cat total.txt)" = 7 ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
