#!/bin/bash
# Make the file test.sh executable.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -x test.sh ] && [ -f test.sh ] && [ "$(cat test.sh)" = $'#!/bin/bash\necho ready' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
