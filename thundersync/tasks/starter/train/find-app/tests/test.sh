#!/bin/bash
# Write the lines of app.log with error to bad.log.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f app.log ] && [ "$(cat app.log)" = $'fine\nerror 7\nok' ]; } || exit 0

if [ -f bad.log ] && [ "$(cat bad.log)" = "error 7" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
