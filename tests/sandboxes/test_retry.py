"""A daemon that is away or busy for a moment: what may be repeated is, what may not be is not, and it ends."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiodocker
import aiohttp
import pytest
from aiohttp import web

from sandboxes import DaemonGone, DockerRuntime, ImageMissing, RuntimeUnavailable, SandboxSpec
from sandboxes.retry import ATTEMPTS, BRIEFLY_AWAY, BUSY_TOO


class Daemon:
    """Answers every question but its version with the next of `statuses`, the last of them for ever."""

    def __init__(self, path: Path) -> None:
        self.host = f"unix://{path}"
        self.path = path
        self.statuses = [200]
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/version"):
            return web.json_response({"ApiVersion": "1.41"})
        self.asked.append(request.path)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status == 0:
            assert request.transport is not None
            request.transport.close()
        return web.json_response([] if status == 200 else {"message": "busy"}, status=status or 500)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path / "d")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", daemon.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(daemon.path)).start()
    yield daemon
    await runner.cleanup()


@pytest.mark.parametrize("first", [[503], [500, 502], [0]])
async def test_looking_is_tried_again_until_the_daemon_answers(daemon: Daemon, first: list[int]) -> None:
    daemon.statuses = [*first, 200]
    runtime = DockerRuntime(daemon.host)
    assert await runtime.reap({}) == 0
    assert sum(path.endswith("containers/json") for path in daemon.asked) == len(first) + 1
    await runtime.close()


async def test_a_daemon_that_stays_busy_is_told_after_a_bounded_number_of_attempts(daemon: Daemon) -> None:
    daemon.statuses = [503]
    runtime = DockerRuntime(daemon.host)
    with pytest.raises(RuntimeUnavailable, match="busy"):
        await runtime.reap({})
    assert len(daemon.asked) == ATTEMPTS
    with pytest.raises(DaemonGone):
        await runtime.start(SandboxSpec(image="x"))
    await runtime.close()


async def test_an_answer_that_will_not_change_is_not_asked_for_twice(daemon: Daemon) -> None:
    daemon.statuses = [400]
    runtime = DockerRuntime(daemon.host)
    with pytest.raises(ImageMissing):
        await runtime.start(SandboxSpec(image="x"))
    assert len(daemon.asked) == 1
    await runtime.close()


def test_what_passes_by_itself() -> None:
    def docker(status: int, text: str = "") -> aiodocker.DockerError:
        return aiodocker.DockerError(status, text)

    assert all(BRIEFLY_AWAY.covers(docker(status)) for status in (900, 502, 503, 504))
    assert not any(BRIEFLY_AWAY.covers(docker(status)) for status in (400, 404, 409, 500))
    assert BUSY_TOO.covers(docker(500)) and not BUSY_TOO.covers(docker(500, "no space left on device"))
    assert BRIEFLY_AWAY.covers(aiohttp.ServerDisconnectedError()) and BRIEFLY_AWAY.covers(DaemonGone("x"))
    assert not BRIEFLY_AWAY.covers(ValueError())
