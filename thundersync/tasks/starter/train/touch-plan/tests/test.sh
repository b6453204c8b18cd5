#!/bin/bash
# Touch the file plan.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f plan.txt ] && [ ! -s plan.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
