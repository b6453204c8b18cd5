#!/bin/bash
# Move the file report.txt to archive.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ ! -e report.txt ] && [ -f archive/report.txt ] && [ "$(cat archive/report.txt)" = "all well" ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
