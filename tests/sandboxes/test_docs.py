"""The guide's example runs as it stands, and its table of names is true."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sandboxes
from sandboxes import ProcessRuntime, RuntimeUnavailable, SandboxError

REPO = Path(__file__).resolve().parents[2]
GUIDE = (REPO / "docs" / "sandboxes.md").read_text()


async def test_the_example_runs_alone() -> None:
    try:
        await ProcessRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(f"THE SANDBOX GUIDE'S EXAMPLE DOES NOT RUN: {error}")
    found = re.search(r"<!-- example: alone -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)}
    settings = {"env": env, "capture_output": True, "text": True, "timeout": 120}
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", found[1]], **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("b'hello\\n' True\nb'/tmp\\n42\\n'\nLatency(count=3, failed=0")


def test_every_error_is_named() -> None:
    errors = {
        name
        for name in sandboxes.__all__
        if isinstance(value := getattr(sandboxes, name), type) and issubclass(value, SandboxError)
    }
    assert not [name for name in errors if f"`{name}`" not in GUIDE]
