#!/bin/bash
# Touch the file index.html.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -f index.html ] && [ ! -s index.html ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
