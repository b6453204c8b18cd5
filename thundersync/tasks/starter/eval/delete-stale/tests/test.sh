#!/bin/bash
# Remove the file stale.log.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f live.log ] && [ "$(cat live.log)" = "text of live" ]; } || exit 0

if [ ! -e stale.log ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
