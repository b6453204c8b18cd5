#!/bin/bash
# Touch the file todo.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f todo.txt ] && [ ! -s todo.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
