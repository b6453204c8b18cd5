#!/bin/bash
# Delete the files x.txt and y.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f z.txt ] && [ "$(cat z.txt)" = "text of z" ]; } || exit 0

met=0
if [ ! -e x.txt ]; then met=$((met + 1)); fi
if [ ! -e y.txt ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
