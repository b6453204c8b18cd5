"""A private Docker daemon for tests: its own socket, data in memory, no network, gone without a trace afterwards.

Where none can be had (not root, no dockerd), tests that need one are skipped with the reason. `docker_host` is the
fixture; a test package takes part by importing it into its conftest.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

BASE_IMAGE = "thundersync/base:test"
BARE_IMAGE = "thundersync/bare:test"
"""The same without python3, so that no agent can run in it."""
_RECIPE = Path(__file__).parents[1] / "tools" / "base_image.sh"


class DockerDaemon:
    """One dockerd (with its containerd), owned by whoever made it. Raises: RuntimeError with the log's end."""

    def __init__(self, *, data_mib: int = 0) -> None:
        """`data_mib`: give its images and containers a disk of that size."""
        # In memory: containers are made and removed ten times faster. Short: a socket's path has 107 bytes at most.
        memory = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="dock.", dir=memory if memory.is_dir() else None))
        if data_mib:
            (self._folder / "data").mkdir()
            size = ["-o", f"size={data_mib}m"]
            subprocess.run(["mount", "-t", "tmpfs", *size, "none", self._folder / "data"], check=True)
        self._log = (self._folder / "log").open("wb")
        self.start()

    def start(self) -> None:
        """Begin, or begin again after `stop`."""
        flags = ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-masq=false", "--ip-forward=false"]
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "TERM"),  # even a killed test run leaves no daemon
                *("dockerd", "-H", self.host, "--pidfile", str(self._folder / "pid"), "--log-level", "warn"),
                *("--data-root", str(self._folder / "data"), "--exec-root", str(self._folder / "exec"), *flags),
            ],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End it in order, with its containers; its images stay."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def import_base(self) -> None:
        """Give it BASE_IMAGE."""
        path = "ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8"
        self.docker("import", "-c", path, "-c", "WORKDIR /workspace", str(base_image_tar()), BASE_IMAGE)

    @property
    def host(self) -> str:
        return f"unix://{self._folder}/docker.sock"

    def docker(self, *arguments: str) -> str:
        """Run the docker client; its output."""
        env = {"PATH": os.environ["PATH"], "DOCKER_HOST": self.host}
        done = subprocess.run(["docker", *arguments], env=env, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"docker {arguments[0]}: {done.stderr}")
        return done.stdout

    def await_ready(self, *, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self.docker("version")
                return
            except RuntimeError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = (self._folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"dockerd did not start: {said}") from error
            time.sleep(0.1)

    def close(self) -> None:
        """Remove its containers, end it, and delete its data."""
        if self._process.poll() is None:
            for container in self.docker("ps", "-aq").split():
                self.docker("rm", "-f", container)
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._log.close()
            for mount in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                where = mount.split()[1]
                if where.startswith(f"{self._folder}/"):
                    subprocess.run(["umount", "-l", where], check=False)
            shutil.rmtree(self._folder, ignore_errors=True)


def base_image_tar() -> Path:
    """The base image's files, made once per recipe and kept in the user's cache. Raises: CalledProcessError."""
    recipe = hashlib.sha256(_RECIPE.read_bytes()).hexdigest()[:16]
    tar = platformdirs.user_cache_path("thundersync") / f"base-image-{recipe}.tar"
    if not tar.exists():
        subprocess.run(["bash", str(_RECIPE), str(tar)], check=True, timeout=600)
    return tar


def missing() -> str:
    """Why no private daemon can run here; empty if one can."""
    if os.geteuid() != 0:
        return "a private Docker daemon needs root"
    absent = [program for program in ("dockerd", "docker", "apt-get", "dpkg-deb") if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (apt install docker.io)" if absent else ""


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[DockerDaemon]:
    """A running private daemon that has BASE_IMAGE and BARE_IMAGE."""
    if reason := missing():
        pytest.skip(f"DOCKER TESTS DO NOT RUN: {reason}")
    base_image_tar()
    daemon = DockerDaemon()
    try:
        daemon.await_ready()
        daemon.import_base()
        daemon.docker("run", "--name", "bare", "--network", "none", BASE_IMAGE, "sh", "-c", "rm -f /usr/bin/python3*")
        daemon.docker("commit", "bare", BARE_IMAGE)
        daemon.docker("rm", "bare")
        yield daemon
    finally:
        daemon.close()


@pytest.fixture(scope="session")
def docker_host(docker_daemon: DockerDaemon) -> str:
    """Address of the private daemon."""
    return docker_daemon.host
