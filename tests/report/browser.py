"""A headless Chromium, driven through its own debugging protocol: open a file, ask it things, take its picture."""

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 120.0


def browser_path() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `errors` collects what scripts threw, what the console said of errors, and what was to be fetched."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket = socket
        self._session = session
        self._numbers = itertools.count(100)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if (waiting := self._answers.pop(told.get("id", -1), None)) is not None:
                waiting.set_result(told)
            match told.get("method"), told.get("params"):
                case "Page.loadEventFired", _:
                    self._loaded.set()
                case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                    self.errors.append(json.dumps(details))
                case "Log.entryAdded", {"entry": {"level": "error"} as entry}:
                    self.errors.append(entry["text"])
                case "Runtime.consoleAPICalled", {"type": "error"} as said:
                    self.errors.append(json.dumps(said))
                case "Network.requestWillBeSent", {"request": {"url": url}}:
                    self.requests.append(url)

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "sessionId": self._session, "method": method, "params": params})
        answer = await asyncio.wait_for(waiting, LIMIT_S)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, path: Path, *, width: int = 1280, height: int = 1000, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded.clear()
        await self.call("Page.navigate", url=path.absolute().as_uri())
        await asyncio.wait_for(self._loaded.wait(), LIMIT_S)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        told = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait, in the page and frame by frame, until `expression` is true."""
        await self.ask(
            f"new Promise((done) => {{ const look = () => ({expression}) ? done(true) : requestAnimationFrame(look); "
            "look(); })"
        )

    async def picture(self, path: Path, *, clip: tuple[float, float, float, float] | None = None) -> None:
        extra: dict[str, object] = {}
        if clip is not None:
            x, y, width, height = clip
            extra = {"clip": {"x": x, "y": y, "width": width, "height": height, "scale": 1}}
        told = await self.call("Page.captureScreenshot", captureBeyondViewport=True, **extra)
        path.write_bytes(base64.b64decode(told["data"]))


@contextlib.asynccontextmanager
async def opened_page(folder: Path) -> AsyncIterator[Page]:
    """A browser with one empty tab; it is gone when the block is left. `folder` takes its profile."""
    path = browser_path()
    assert path is not None
    process = await asyncio.create_subprocess_exec(
        path, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
        f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        endpoint = await asyncio.wait_for(_endpoint(process.stderr), LIMIT_S)
        async with aiohttp.ClientSession() as session, session.ws_connect(endpoint, max_msg_size=0) as socket:
            await socket.send_json({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}})
            target = (await _answer(socket, 1))["targetId"]
            await socket.send_json(
                {"id": 2, "method": "Target.attachToTarget", "params": {"targetId": target, "flatten": True}}
            )
            page = Page(socket, (await _answer(socket, 2))["sessionId"])
            listening = asyncio.create_task(page.listen())
            try:
                yield page
            finally:
                listening.cancel()
                await asyncio.wait({listening})
    finally:
        process.kill()
        await process.communicate()


async def _endpoint(stream: asyncio.StreamReader) -> str:
    while line := await stream.readline():
        if found := re.search(rb"DevTools listening on (ws://\S+)", line):
            return found[1].decode()
    raise AssertionError("the browser ended before it could be talked to")


async def _answer(socket: aiohttp.ClientWebSocketResponse, number: int) -> dict[str, Any]:
    while True:
        told = json.loads((await socket.receive(timeout=LIMIT_S)).data)
        if told.get("id") == number:
            result: dict[str, Any] = told["result"]
            return result
