#!/bin/bash
# Delete the file temp.log.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f main.log ] && [ "$(cat main.log)" = "text of main" ]; } || exit 0

if [ ! -e temp.log ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
