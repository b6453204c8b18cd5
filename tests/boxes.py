"""Process sandboxes for tests, which are skipped loudly on a machine that has none."""

import pytest

from sandboxes import ProcessRuntime, RuntimeUnavailable


async def process_runtime() -> ProcessRuntime:
    """One that works here. Whoever asks for it closes it."""
    runtime = ProcessRuntime()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(f"PROCESS SANDBOX TESTS DO NOT RUN: {error}")
    return runtime
