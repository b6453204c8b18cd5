"""A connection to a Docker daemon: where it is, and what to say when it is not. Knows no containers.

aiodocker answers an absent or foreign daemon in five ways (measured with 0.27); here they become one error.
"""

import asyncio

import aiodocker
import aiohttp

from sandboxes.errors import RuntimeUnavailable

DEFAULT_HOST = "unix:///var/run/docker.sock"
REMEDY = (
    "Start Docker (systemctl start docker), allow this user to use it (the docker group), or point DOCKER_HOST at the "
    "daemon. Without Docker, process sandboxes (bubblewrap) run tasks that need no image."
)


class DockerClient:
    """One session with a daemon, opened on first use and closed by `close`.

    `docker_host` is what DOCKER_HOST may hold: `unix://path` or `tcp://host:port`; empty means the default socket.
    """

    def __init__(self, docker_host: str = "") -> None:
        self._host = docker_host or DEFAULT_HOST
        self._connector: aiohttp.BaseConnector | None = None
        self._docker: aiodocker.Docker | None = None

    @property
    def host(self) -> str:
        return self._host

    def open(self) -> aiodocker.Docker:
        """The session. Raises: RuntimeUnavailable for an address that cannot be one."""
        if self._docker is None:
            # No limit: every sandbox holds a stream, and 100 of them (the default) would deadlock all other calls.
            if self._host.startswith("unix://"):
                self._connector, url = (
                    aiohttp.UnixConnector(self._host.removeprefix("unix://"), limit=0),
                    "unix://localhost",
                )
            elif self._host.startswith(("tcp://", "http://")):
                self._connector, url = aiohttp.TCPConnector(limit=0), "http://" + self._host.partition("://")[2]
            else:
                raise RuntimeUnavailable(
                    f"not a Docker address: {self._host}", remedy="Use unix://PATH or tcp://HOST:PORT."
                )
            timeout = aiohttp.ClientTimeout(total=120, sock_connect=5)
            self._docker = aiodocker.Docker(url=url, connector=self._connector, timeout=timeout)
        return self._docker

    async def check(self) -> None:
        """Ask the daemon for its version. Raises: RuntimeUnavailable."""
        try:
            async with asyncio.timeout(10.0):
                await self.open().version()
        except (aiodocker.DockerError, aiohttp.ClientError, OSError, AssertionError, ValueError, TypeError) as error:
            reason = str(error) or type(error).__name__
            raise RuntimeUnavailable(f"no Docker daemon answers at {self._host} ({reason})", remedy=REMEDY) from error

    async def close(self) -> None:
        """End the session. Idempotent."""
        docker, self._docker = self._docker, None
        if docker is not None:
            await docker.close()
        if self._connector is not None:
            await self._connector.close()
            self._connector = None
