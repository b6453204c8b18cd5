#!/bin/bash
# Make the file build.sh executable.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /workspace || exit 0

if [ -x build.sh ] && [ -f build.sh ] && [ "$(cat build.sh)" = $'#!/bin/bash\necho ready' ]; then
  echo 1 > /logs/verifier/reward.txt
fi
exit 0
