#!/bin/bash
# Create a file named hello.txt with the text hello.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

if [ -f hello.txt ] && [ "$(cat hello.txt)" = "hello" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
