"""Watching a run: a live panel where there is a terminal, one line per important event where there is none.

The last stop of the events; `run` shows its own run with it and `monitor` anybody's. It knows nothing of training.
"""

import asyncio
import contextlib
import math
import os
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from thundersync.monitor.client import events
from thundersync.monitor.events import (
    AnyEvent,
    Audited,
    CheckpointSaved,
    EvalFinished,
    EvalStarted,
    Event,
    GroupClosed,
    RolloutFailed,
    RunFinished,
    RunStarted,
    StepCommitted,
    StepOpened,
    Warned,
    to_line,
)
from thundersync.monitor.keys import ViewerKeys
from thundersync.monitor.panel import commit_facts, render, rewards_text, span
from thundersync.monitor.shapes import BLUE, DIM, GREEN, ORANGE, RED, Frame
from thundersync.monitor.state import RunView

_FRAMES_PER_S = 8


Say = Callable[[str], None]
"""Told what is waited for; an empty text: nothing any more."""


def drawable(console: Console) -> bool:
    """Whether pictures can be drawn there."""
    return console.is_terminal and not console.is_dumb_terminal and "utf" in console.encoding.lower()


async def show(
    target: str,
    *,
    plain: bool = False,
    console: Console,
    keys: ViewerKeys | None = None,
    say: Say = lambda text: None,
) -> RunView:
    """Watch a run, live or over, until it ends; then print its summary. Returns what was known at the end.

    `target` is a run folder or an address. `plain`, or a console that is no terminal, means lines instead of a panel.
    Raises: what `client.events` raises. Cancelling leaves the terminal as it was.
    """
    view = RunView()
    if plain or not drawable(console):
        await _lines(events(target, keys=keys, say=say), view, console)
    else:
        await _panel(target, view, console)
    if view.run is not None:
        with contextlib.suppress(SystemExit):
            console.print(summary(view))
    return view


async def pipe(target: str, output: TextIO, *, keys: ViewerKeys | None = None, say: Say = lambda text: None) -> None:
    """Every event as one JSON object a line, for `jq` and the like; ends with the run."""
    async with contextlib.aclosing(events(target, keys=keys, say=say)) as stream:
        async for event in stream:
            try:
                output.write(to_line(event).decode())
                output.flush()
            except BrokenPipeError:  # `| head` has seen enough; what Python flushes at its end goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
                return


def plain_line(event: Event, view: RunView) -> str | None:
    """One line for an event that matters to people, else None. `view` has applied the event already."""
    clock = time.strftime("%H:%M:%S ", time.localtime(event.at_s))
    match event:
        case RunStarted(algo="eval"):
            return (
                f"{clock}evaluation {event.name}: {event.model}, {event.backend} engine, {event.runtime} sandboxes, "
                f"{event.prompts_per_step} tasks x {event.group_size} samples"
            )
        case RunStarted():
            resumed = f", resumed after step {event.start_step}" if event.start_step else ""
            return (
                f"{clock}run {event.name}: {event.model}, {event.algo}, {event.mode}, {event.backend} engine, "
                f"{event.runtime} sandboxes, {event.max_steps} steps of {event.prompts_per_step} x "
                f"{event.group_size} rollouts, seed {event.seed}{resumed}"
            )
        case StepOpened():
            rollouts = len(event.group_ids) * event.group_size
            step = f"step {view.made + 1}/{view.max_steps}"
            return f"{clock}{step} opened: {rollouts} rollouts, policy v{event.policy_version}"
        case GroupClosed():
            group = view.groups.get(event.group_id)
            task = group.task_id if group else event.group_id
            verdict = "dropped" if event.dropped else "flat" if event.flat else "closed"
            mean = f", mean {statistics.fmean(event.rewards):.2f}" if event.rewards else ""
            return f"{clock}  {task} {verdict}: {rewards_text(event.rewards) or 'no rewards'}{mean}"
        case RolloutFailed():
            fate = "will be retried" if event.will_retry else "given up"
            return f"{clock}  rollout {event.rollout_id} failed ({event.failure}, {fate}): {_short(event.detail)}"
        case Audited():
            verdict = "exact" if event.ok else "NOT EXACT, nothing is committed"
            return (
                f"{clock}  audit: {verdict}: streamed and one-piece gradient differ by {event.relative_l2:.1e} "
                f"(tolerance {event.tolerance:.0e}; most in {event.worst_name}, {event.worst:.1e})"
            )
        case StepCommitted():
            eta_s = view.eta_s(event.at_s)
            left = f"  ETA {span(eta_s)}" if eta_s is not None else ""
            return (
                f"{clock}step {view.made}/{view.max_steps} committed: {commit_facts(event.metrics, event.empty)}{left}"
            )
        case EvalStarted():
            return f"{clock}evaluating policy v{event.policy_version}: {event.rollouts} rollouts"
        case EvalFinished():
            failed = f", {event.failed} failed" if event.failed else ""
            return (
                f"{clock}eval of policy v{event.policy_version}: reward {event.reward_mean:.2f} over {event.scored} "
                f"rollouts{failed}, {span(event.seconds)}"
            )
        case CheckpointSaved():
            return f"{clock}checkpoint {event.path}"
        case Warned():
            return f"{clock}warning: {_short(event.text)}"
        case RunFinished():
            end = "finished" if event.ok else f"stopped: {_short(event.reason)}"
            what = f"run {end} after {event.steps} steps" if view.max_steps else f"evaluation {end}"
            return f"{clock}{what}, {span(event.seconds)}"
        case _:
            return None


def summary(view: RunView) -> RenderableType:
    """What a run came to: rewards before and after, where the time went, where the files are."""
    run = view.run
    end = view.finished
    name, folder = (run.name, run.run_dir) if run else ("?", "?")
    seconds = span(end.seconds if end else view.elapsed_s(view.at_s))
    state = Text("finished", GREEN) if end and end.ok else Text(_stopped(end), RED)
    steps = f"{view.made} of {view.max_steps} steps " if view.max_steps else ""
    lines = [Text.assemble((name, "bold"), "  ", state, f"  {steps}in {seconds}")]
    if view.evals:
        lines.append(_row("eval reward", _change([each.reward_mean for each in view.evals], ORANGE)))
    curve = [value for value in view.curve() if math.isfinite(value)]
    if len(curve) > 1:
        some = min(5, len(curve) // 2)
        text = _change([statistics.fmean(curve[:some]), statistics.fmean(curve[-some:])], BLUE)
        lines.append(_row("train reward", text.append(f"  (first and last {some} steps)" if some > 1 else "", DIM)))
    if shares := _shares(view):
        lines.append(_row("time", Text("  ".join(f"{word} {share:.0%}" for word, share in shares.items()))))
    lines.append(_row("files", Text(f"{folder}/ (config, events, metrics, rollouts)")))
    if view.checkpoint is not None:
        lines.append(_row("model", Text(view.checkpoint.path)))
    return Group(*lines)


async def _panel(target: str, view: RunView, console: Console) -> None:
    def frame(now_s: float) -> Frame:
        return render(view, now_s=now_s, width=console.width, height=console.height - 1)

    follower = asyncio.create_task(_follow(target, view), name="monitor")
    try:
        await asyncio.wait({follower}, timeout=0.3)  # a wrong target is an error message, not an empty panel
        if not follower.done() or follower.exception() is None:
            with Live(frame(view.at_s), console=console, auto_refresh=False, vertical_overflow="crop") as live:
                drawn = ""
                while not follower.done():
                    await asyncio.wait({follower}, timeout=1 / _FRAMES_PER_S)
                    picture = frame(max(view.at_s, time.time()))
                    if picture.plain != drawn:
                        drawn = picture.plain
                        await _draw(live, picture)
                await _draw(live, frame(view.at_s))
    finally:
        follower.cancel()
        await asyncio.wait({follower})
    follower.result()


async def _draw(live: Live, picture: Frame) -> None:
    """In a thread: a terminal may take its time, and the run shares this loop."""
    drawing = asyncio.create_task(asyncio.to_thread(live.update, picture, refresh=True))
    try:
        await asyncio.shield(drawing)
    except asyncio.CancelledError:
        await asyncio.wait({drawing}, timeout=1.0)  # else it would draw over what comes after the panel
        raise


async def _follow(target: str, view: RunView) -> None:
    async with contextlib.aclosing(events(target)) as stream:
        async for event in stream:
            view.apply(event)


async def _lines(told: AsyncGenerator[AnyEvent, None], view: RunView, console: Console) -> None:
    async with contextlib.aclosing(told) as stream:
        async for event in stream:
            view.apply(event)
            line = plain_line(event, view)
            if line is not None:
                try:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                except SystemExit:  # rich's word for a broken pipe: `| head` has seen enough
                    return


def _stopped(end: RunFinished | None) -> str:
    return f"stopped: {_short(end.reason)}" if end else "ended without a word (killed?)"


def _row(word: str, text: Text) -> Text:
    return Text.assemble((f"  {word:<13}", DIM), text)


def _change(values: list[float], colour: str) -> Text:
    before, after = values[0], values[-1]
    if len(values) == 1:
        return Text(f"{before:.2f}", colour)
    return Text.assemble(f"{before:.2f} → ", (f"{after:.2f}", f"bold {colour}"), f"  ({after - before:+.2f})")


def _shares(view: RunView) -> dict[str, float]:
    if view.finished is not None and view.finished.shares:
        return view.finished.shares
    known = {"generation": view.share("engine_busy"), "trainer": view.share("trainer_busy")}
    return {word: share for word, share in known.items() if share is not None}


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:299]}…"
