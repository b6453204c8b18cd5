#!/bin/bash
# Remove the files a.log and b.log.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f c.log ] && [ "$(cat c.log)" = "text of c" ]; } || exit 0

met=0
if [ ! -e a.log ]; then met=$((met + 1)); fi
if [ ! -e b.log ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
