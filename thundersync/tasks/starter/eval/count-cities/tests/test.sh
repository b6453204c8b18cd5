#!/bin/bash
# Write the number of lines in cities.txt to total.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f cities.txt ] && [ "$(cat cities.txt)" = $'rome\noslo\nlima' ]; } || exit 0

met=0
if read -r first rest < total.txt && [ "$first" = 3 ]; then met=$((met + 1)); fi
if [ -f total.txt ] && [ "$(cat total.txt)" = "3" ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
