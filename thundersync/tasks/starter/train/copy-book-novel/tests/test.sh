#!/bin/bash
# Make a copy of book.txt named novel.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f book.txt ] && [ "$(cat book.txt)" = "chapter one" ]; } || exit 0

if [ -f novel.txt ] && [ "$(cat novel.txt)" = "chapter one" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
