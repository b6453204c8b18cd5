#!/bin/bash
# Move book.txt into the folder library.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e book.txt ] && [ -f library/book.txt ] && [ "$(cat library/book.txt)" = "chapter one" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
