"""What `python -m thundersync tasks check` does: loads, checks, reports. The parts live beside it."""

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar, get_args

from rich.console import Console
from rich.markup import escape

import sandboxes
from thundersync.errors import ConfigError
from thundersync.tasks.check import BAD, TaskCheck, TaskReport
from thundersync.tasks.load import find_all
from thundersync.tasks.report import ReportFile, summary, table
from thundersync.tasks.rows import USUAL_SPLIT
from thundersync.tasks.standin import StandIn

RuntimeKind = Literal["auto", "docker", "process"]
NetworkKind = Literal["task", "off"]
T = TypeVar("T")
_FILE_WIDTH = 240
"""Columns of a table that goes into a file or a pipe."""


async def check_all(
    path: str,
    *,
    runtime: str,
    docker_host: str,
    jobs: int,
    json: Path | None,
    again: bool,
    network: str,
    stand_in: str,
    bake_tools: bool = False,
    split: str = USUAL_SPLIT,
    variables: Mapping[str, str],
    console: Console,
    bad: list[str],
) -> None:
    """Check the tasks at `path`; print a line for each, a table and a summary; put the keys of bad tasks into `bad`.

    Raises: TaskError, ConfigError, RuntimeUnavailable.
    """
    kind: RuntimeKind = _one_of("--runtime", runtime, get_args(RuntimeKind))
    net: NetworkKind = _one_of("--network", network, get_args(NetworkKind))

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    found = await asyncio.to_thread(find_all, path, split=split, variables=variables, say=say)
    report = ReportFile(json, again=again)
    chosen = await sandboxes.choose(kind, docker_host=docker_host, box_mib=sandboxes.BOX_MIB)
    try:
        left = [
            each
            for each in found
            if not report.holds(each.key, runtime=chosen.name, stand_in=stand_in, baked=bake_tools)
        ]
        if stand_in and chosen.name != "docker":
            raise ConfigError("--stand-in names an image, and process sandboxes have none", remedy="--runtime docker")
        if bake_tools and chosen.name != "docker":
            raise ConfigError("--bake-tools builds images, and process sandboxes have none", remedy="--runtime docker")
        console.print(f"{len(left)} of {len(found)} tasks to check, in {chosen.name} sandboxes", highlight=False)
        with tempfile.TemporaryDirectory(prefix="thundersync-stand-in-") as folder:
            checks = TaskCheck(
                chosen,
                jobs=jobs,
                network=net,
                stand_in=stand_in,
                place=StandIn(stand_in, Path(folder)).place if stand_in else None,
                bake=bake_tools,
            )

            def done(each: TaskReport) -> None:
                report.add(each)
                console.print(f"[dim]{each.seconds:6.1f} s[/] {each.state:13} {escape(each.key)}", highlight=False)

            await checks.run(left, done=done)
    finally:
        report.close()
        await chosen.close()
    reports = [report.known[each.key] for each in found]
    wide = console if console.is_terminal else Console(file=console.file, width=_FILE_WIDTH, no_color=True)
    wide.print(table(reports))
    console.print(summary(reports), markup=False, highlight=False, soft_wrap=True)
    if stand_in:
        console.print(f"every base image was {stand_in}, not the one that the task names", markup=False)
    bad += [each.key for each in reports if each.state in BAD]


def _one_of(option: str, value: str, values: tuple[T, ...]) -> T:
    for each in values:
        if each == value:
            return each
    known = ", ".join(map(str, values))
    raise ConfigError(f"{option} is {value!r}", remedy=f"Give one of: {known}.")
