"""Where a run stands when it begins: its folder, its feed, and the checkpoint that a resumed one continues from.

Opens what is on disk and refuses another run's; starts no engine and no worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from msgspec import Struct

from thundersync.checkpoints import Checkpoints, CheckpointState
from thundersync.config import Config
from thundersync.config_file import to_toml
from thundersync.monitor.feed import Feed
from thundersync.monitor.keys import run_keys
from thundersync.refusals import refuse_other_run, run_state
from thundersync.report.environment import write_environment
from thundersync.rundir import RunFolder
from thundersync.tasks.source import TaskSource


class Opened(Struct, kw_only=True):
    """What is on disk."""

    folder: RunFolder
    feed: Feed
    checkpoints: Checkpoints
    state: CheckpointState
    checkpoint: str
    """The folder to continue from; empty at a run's beginning."""


async def open_run(
    config: Config,
    source: TaskSource,
    *,
    resume: bool,
    say: Callable[[str], None],
    stack: AsyncExitStack,
    failed: ExitStack,
) -> Opened:
    """Make the run's folder, or take it up again. `failed` frees the name of a new run that does not come to begin.

    Raises: ResumeError.
    """
    folder = RunFolder.create(config.output_dir, config.name, to_toml(config), resume)
    stack.push_async_callback(folder.close)
    keys = run_keys(Path(config.monitor.keys)) if config.monitor.keys else None
    feed = Feed.open(folder.path, bind=config.monitor.bind, keys=keys)
    stack.push_async_callback(feed.close)
    checkpoints = Checkpoints(folder.checkpoints, keep_last=config.ckpt.keep_last)
    found = checkpoints.latest() if resume else None
    if resume and found is None:
        say("no checkpoint yet: the run starts again from its first step")
    fresh = run_state(config, source, step=0, policy_version=0)
    state = found[1] if found else fresh
    refuse_other_run(state, fresh)
    if resume:
        folder.take_config(to_toml(config))
        await folder.rewind(state.step, state.policy_version)
    else:
        failed.callback(folder.free_name)
    await asyncio.to_thread(write_environment, folder.path)
    return Opened(
        folder=folder, feed=feed, checkpoints=checkpoints, state=state, checkpoint=str(found[0]) if found else ""
    )
