"""What every test shares. One thread per process: a fork after a threaded torch region would hang for ever."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

from tests.docker_daemon import docker_daemon, docker_host

# Time never decides a test, and chance does not either: the same examples every time. HYPOTHESIS_PROFILE=search looks
# for new ones.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (`--dist loadgroup`), what is costly to start is started in one process only."""
    for item in items:
        daemon = "docker" in item.keywords or "docker_daemon" in getattr(item, "fixturenames", ())
        if daemon or "sandboxes" in item.path.parts:
            group = "sandboxes"
        else:
            group = "vllm" if "vllm" in item.keywords else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


__all__ = ["docker_daemon", "docker_host"]
