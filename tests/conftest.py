"""What every test shares. One thread per process: a fork after a threaded torch region would hang for ever."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

from tests.docker_daemon import docker_daemon, docker_host

# Time never decides a test.
settings.register_profile("thundersync", deadline=None)
settings.load_profile("thundersync")

__all__ = ["docker_daemon", "docker_host"]
