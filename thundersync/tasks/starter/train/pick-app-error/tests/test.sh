#!/bin/bash
# Save the lines of app.txt with error to bad.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /work || exit 0

# This file was not to be touched.
{ [ -f app.txt ] && [ "$(cat app.txt)" = $'ok 1\nerror 2\nok 3' ]; } || exit 0

if [ -f bad.txt ] && [ "$(cat bad.txt)" = "error 2" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
