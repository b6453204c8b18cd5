#!/bin/bash
# Move the file letter.txt into the folder mail.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e letter.txt ] && [ -f mail/letter.txt ] && [ "$(cat mail/letter.txt)" = "dear friend" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
