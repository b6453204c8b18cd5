#!/usr/bin/env python3
"""Makes `.venv` from nothing: `python3 tools/setup.py`, which is what `make setup` runs. `--help` lists its options.

This file only finds a Python that fits and hands over to `installer.py`. It is written so that Python 3.6 can still
read it: an old Python should be told that it is too old, not that a line is wrong.
"""

import os
import platform
import shutil
import subprocess
import sys

OLDEST, NEWEST = (3, 11), (3, 14)
"""What vLLM 0.32 accepts."""


def main() -> int:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        return use_another_python()
    import installer  # beside this file

    return installer.main()


def use_another_python() -> int:
    """Become the same script under a Python of this machine that fits, or say what to install."""
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    running = platform.python_version()
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        other = shutil.which(f"python3.{minor}")
        # A version manager leaves launchers of that name which start nothing, so try it first.
        if other and subprocess.call([other, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
            print(f"  Python {running} does not fit (needed: {span}); using {other}", flush=True)
            os.execv(other, [other, os.path.realpath(sys.argv[0]), *sys.argv[1:]])
    print(
        f"setup stopped: Python {running} does not fit: thundersync and vLLM need {span}\n"
        "  -> Install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv), then run setup with it, "
        "for instance: python3.11 tools/setup.py",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
