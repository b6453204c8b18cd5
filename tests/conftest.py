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


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (`--dist loadgroup`), what is costly to start is started in one process only, and
    what takes longest comes first: the one long queue of sandbox tests mostly waits, beside tests that compute."""
    for item in items:
        if (group := _group(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _LONGEST_FIRST.index(_part(item)))


_LONGEST_FIRST = ["sandboxes", "vllm", "endtoend", "verify", "learn", "generate", "rest"]


def _part(item: pytest.Item) -> str:
    """Which of `_LONGEST_FIRST` the test is a part of."""
    names = [_group(item), *item.path.parts]
    return next((part for part in _LONGEST_FIRST if part in names), "rest")


def _group(item: pytest.Item) -> str | None:
    if "docker" in item.keywords or "docker_daemon" in getattr(item, "fixturenames", ()):
        return "sandboxes"
    if "endtoend" in item.path.parts:
        return None  # each starts everything for itself
    if "sandboxes" in item.path.parts:
        return "sandboxes"
    return "vllm" if "vllm" in item.keywords else item.nodeid.partition("::")[0]


__all__ = ["docker_daemon", "docker_host"]
