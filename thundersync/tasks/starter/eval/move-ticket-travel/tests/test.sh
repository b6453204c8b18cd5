#!/bin/bash
# Move the file ticket.txt into the folder travel.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e ticket.txt ] && [ -f travel/ticket.txt ] && [ "$(cat travel/ticket.txt)" = "seat 12" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
