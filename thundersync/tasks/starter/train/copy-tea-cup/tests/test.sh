#!/bin/bash
# Use cp to copy tea.txt to cup.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f tea.txt ] && [ "$(cat tea.txt)" = "black tea" ]; } || exit 0

if [ -f cup.txt ] && [ "$(cat cup.txt)" = "black tea" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
