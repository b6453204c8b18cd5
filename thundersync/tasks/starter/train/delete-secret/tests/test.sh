#!/bin/bash
# Delete the file secret.txt.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

# This file was not to be touched.
{ [ -f public.txt ] && [ "$(cat public.txt)" = "text of public" ]; } || exit 0

if [ ! -e secret.txt ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
