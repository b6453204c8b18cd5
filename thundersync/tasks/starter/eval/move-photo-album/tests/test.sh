#!/bin/bash
# Move photo.txt into the folder album.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e photo.txt ] && [ -f album/photo.txt ] && [ "$(cat album/photo.txt)" = "a beach" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
