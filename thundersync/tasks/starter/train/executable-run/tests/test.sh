#!/bin/bash
# Make the file run.sh executable.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -x run.sh ] && [ -f run.sh ] && [ "$(cat run.sh)" = $'#!/bin/bash\necho ready' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
