#!/bin/bash
# Rename start.txt to end.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e start.txt ] && [ -f end.txt ] && [ "$(cat end.txt)" = "a long way" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
