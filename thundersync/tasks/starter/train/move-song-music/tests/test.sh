#!/bin/bash
# Move the file song.txt into the folder music.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e song.txt ] && [ -f music/song.txt ] && [ "$(cat music/song.txt)" = "la la la" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
