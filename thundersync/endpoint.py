"""The endpoint of a run, put together: what is loaded before the engines, the door itself, and rollouts behind it.

Beside `assembly`, which uses it where the configuration has [serve]. What a session is and what HTTP has to do with it
is in `serve`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from thundersync.config import Config, RolloutConfig, ServeConfig
from thundersync.core.types import GroupId
from thundersync.errors import ConfigError
from thundersync.generate.vllm_tools import VllmToolParser
from thundersync.models import base_of
from thundersync.rollout.dialogue import Renderer
from thundersync.serve.absence import Absence
from thundersync.serve.agents import Inner, SessionAgent, Visitors, Who
from thundersync.serve.desk import Desk, new_key
from thundersync.serve.program import Program
from thundersync.serve.server import Endpoint
from thundersync.serve.session import Rules

DOOR = "endpoint.json"
"""In the run's folder, readable by its owner only: where the endpoint is, and its key."""

_PROBE = {"type": "function", "function": {"name": "probe", "description": "A probe.", "parameters": {}}}


def refuse_missing_parser(serve: ServeConfig | None) -> None:
    """For the very beginning of a run. Raises: ConfigError for a tool parser without vLLM, which has them."""
    if serve is not None and serve.tool_parser and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"serve.tool_parser = {serve.tool_parser!r} is a parser of vLLM's, and vLLM is not installed",
            remedy='pip install "thundersync[cpu]" (or [gpu]), or leave serve.tool_parser out: requests with tools '
            "are then refused.",
        )


class Door:
    """A run's endpoint: open from `open_door` until `close`."""

    def __init__(
        self,
        config: Config,
        serve: ServeConfig,
        *,
        desk: Desk,
        endpoint: Endpoint,
        renderer: Renderer,
        parser: VllmToolParser | None,
        vocabulary: int,
        environment: Mapping[str, str],
        absence: Absence,
        watching: asyncio.Task[None],
        file: Path,
    ) -> None:
        self._config = config
        self._serve = serve
        self._desk = desk
        self._endpoint = endpoint
        self._renderer = renderer
        self._parser = parser
        self._vocabulary = vocabulary
        self._environment = environment
        self._absence = absence
        self._file = file
        self._watching = watching

    def agent(
        self,
        rollout: RolloutConfig,
        inner: Inner,
        *,
        on_opening: Callable[[GroupId, Sequence[int]], None] | None = None,
    ) -> SessionAgent:
        """What carries out rollouts as sessions; `inner` makes what is below them."""
        serve = self._serve
        who: Who
        if serve.command:
            # A program has its session's key: the run's own would open every session, and reward them.
            inherited = {name: value for name, value in self._environment.items() if name != serve.api_key_env}
            who = Program(serve.command, environment=inherited, url=lambda: self._endpoint.local_url)
        else:
            who = Visitors(idle_timeout_s=serve.idle_timeout_s)
        return SessionAgent(
            self._desk,
            who,
            inner=inner,
            renderer=self._renderer,
            parser=self._parser,
            rules=Rules(
                model=model_name(self._config),
                context_tokens=self._config.model.max_model_len,
                vocabulary=self._vocabulary,
                temperature=rollout.temperature,
                max_tokens=rollout.max_tokens,
                stop=rollout.stop,
                command_timeout_s=rollout.command_timeout_s,
                client_judges=serve.judge == "client",
            ),
            verdict_s=serve.idle_timeout_s,
            on_opening=on_opening,
        )

    def heartbeat(self) -> None:
        """Something moved in the run: it has not stalled."""
        self._absence.moved()

    def missing(self) -> str:
        """Who is waited for, in words; empty where nobody is."""
        return self._desk.missing

    async def end(self) -> None:
        """No further rollouts: programs that wait for one are told."""
        await self._desk.end()

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.wait({self._watching})
        self._file.unlink(missing_ok=True)
        await self._endpoint.close()
        if not self._watching.cancelled():
            self._watching.result()  # it ends by an error or not at all


async def open_door(
    config: Config,
    serve: ServeConfig,
    *,
    folder: Path,
    model_path: Path,
    renderer: Renderer,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Door:
    """Load what reads tool calls, listen, and write down where and under which key. `warn` is told while rollouts wait
    for programs that do not come.

    Raises: ConfigError for an unknown tool parser, a template without tools, a key that is not there, an address that
    cannot be had.
    """
    parser = None
    if serve.tool_parser:
        parser = await asyncio.to_thread(VllmToolParser.load, serve.tool_parser, model_path)
        _refuse_silent_template(renderer, serve)
    if serve.api_key_env and not environment.get(serve.api_key_env):
        raise ConfigError(
            f"serve.api_key_env names {serve.api_key_env}, which is not set",
            remedy="Set that variable to the key, or leave serve.api_key_env out: a key is then made.",
        )
    key = environment[serve.api_key_env] if serve.api_key_env else new_key()
    absence = Absence(where=lambda: endpoint.url, stall_timeout_s=config.stall_timeout_s, warn=warn)
    desk = Desk(key=key, absence=absence)
    endpoint = Endpoint(
        desk,
        host=serve.host,
        port=serve.port,
        model=model_name(config),
        context_tokens=config.model.max_model_len,
        max_body_bytes=int(serve.max_body_mib * 2**20),
        public_url=serve.public_url,
    )
    vocabulary = await asyncio.to_thread(_vocabulary, model_path)
    url = await endpoint.start()
    file = folder / DOOR
    door = Door(
        config,
        serve,
        desk=desk,
        endpoint=endpoint,
        renderer=renderer,
        parser=parser,
        vocabulary=vocabulary,
        environment=environment,
        absence=absence,
        watching=asyncio.create_task(desk.watch(), name="desk"),
        file=file,
    )
    try:
        await asyncio.to_thread(_write, file, {"url": url, "api_key": key, "model": model_name(config)})
    except OSError as error:
        await door.close()
        raise ConfigError(f"{file} cannot be written: {error}", remedy="Choose another output_dir.") from error
    told = f"in {serve.api_key_env}" if serve.api_key_env else f"{key} (also in {file})"
    say(f"endpoint at {url}; its key is {told}")
    return door


def model_name(config: Config) -> str:
    """What the policy is called at the endpoint; requests may call it anything."""
    return config.model.name.rstrip("/").rpartition("/")[2] or config.model.name


def _refuse_silent_template(renderer: Renderer, serve: ServeConfig) -> None:
    """A template that leaves tools out would let the model guess what it may call."""
    asked = [{"role": "user", "content": "a"}]
    if renderer.render(asked, tools=[_PROBE]) == renderer.render(asked, tools=[]):
        raise ConfigError(
            f"serve.tool_parser = {serve.tool_parser!r}, but the model's chat template declares no tools",
            remedy="Use a model that was trained on tools, or leave serve.tool_parser out.",
        )


def _vocabulary(model_path: Path) -> int:
    """Rows of the model's head, padding included."""
    described = msgspec.json.decode((base_of(model_path) / "config.json").read_bytes())
    return int(described.get("text_config", described)["vocab_size"])


def _write(file: Path, told: Mapping[str, str]) -> None:
    file.unlink(missing_ok=True)  # a killed run leaves it
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(msgspec.json.encode(told) + b"\n")
