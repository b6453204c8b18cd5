#!/bin/bash
# Delete the files p.txt and q.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f r.txt ] && [ "$(cat r.txt)" = "text of r" ]; } || exit 0

met=0
if [ ! -e p.txt ]; then met=$((met + 1)); fi
if [ ! -e q.txt ]; then met=$((met + 1)); fi
case $met in
  1) echo 0.5 > /logs/verifier/reward.txt ;;
  2) echo 1 > /logs/verifier/reward.txt ;;
esac
exit 0
