"""What every test shares. One thread per process: a fork after a threaded torch region would hang for ever."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from tests.docker_daemon import docker_daemon, docker_host

# Time never decides a test.
settings.register_profile("thundersync", deadline=None)
settings.load_profile("thundersync")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (`--dist loadgroup`), what is costly to start is started in one process only."""
    for item in items:
        if "docker" in item.keywords or "sandboxes" in item.path.parts:
            group = "sandboxes"
        else:
            group = "vllm" if "vllm" in item.keywords else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


__all__ = ["docker_daemon", "docker_host"]
