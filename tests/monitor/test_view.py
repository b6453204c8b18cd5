import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.monitor.fake_run import fake_run
from thundersync.monitor import events as e
from thundersync.monitor.client import NothingToWatch
from thundersync.monitor.feed import Feed
from thundersync.monitor.state import RunView
from thundersync.monitor.view import pipe, plain_line, show, summary
from thundersync.rundir import RunFolder

STREAM = list(fake_run(steps=2, groups=2, size=4, seed=5))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunFolder]:
    async with RunFolder.create(tmp_path, "run", "", False) as folder:
        yield folder


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)


def paper() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def seen(console: Console, watching: "asyncio.Task[RunView]", word: str) -> None:
    while word not in printed(console) and not watching.done():
        await asyncio.wait({watching}, timeout=0.01)


async def told_while_watched(run: RunFolder, console: Console, *, plain: bool = False) -> RunView:
    async with Feed.open(run.path) as feed:
        watching = asyncio.create_task(show(str(run.path), plain=plain, console=console))
        feed.emit(STREAM[0])
        await seen(console, watching, "20261129")
        for event in STREAM[1:]:
            feed.emit(event)
        return await asyncio.wait_for(watching, 60)


async def test_a_terminal_gets_the_panel_and_then_the_summary(run: RunFolder) -> None:
    console = terminal()
    view = await told_while_watched(run, console)
    assert view.phase == "finished"
    text = printed(console)
    assert "╭─ thundersync  20261129-1624-smollm2" in text
    assert "step 2/2 ━" in text
    assert text.index("╰──") < text.index("0.16 → 0.63  (+0.47)")
    assert text.endswith("\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize("plain", [False, True])
async def test_without_a_terminal_there_are_lines(run: RunFolder, plain: bool) -> None:
    console = terminal() if plain else paper()
    await told_while_watched(run, console, plain=plain)
    text = printed(console)
    assert "╭" not in text and "\x1b" not in text
    for fact in (
        "run 20261129-1624-smollm2: SmolLM2-135M-Instruct, grpo, stream, vllm engine, process sandboxes, ",
        "2 steps of 2 x 4 rollouts, seed 42",
        "step 1/2 opened: 8 rollouts, policy v0",
        "step 2/2 committed: reward",
        "eval of policy v2: reward 0.63 over 6 rollouts",
        "checkpoint checkpoints/step-000002",
        "run finished after 2 steps",
        "eval reward  0.16 → 0.63  (+0.47)",
        "time         generation 83%  trainer 46%  commit 3%  publish 2%  eval 7%",
        "files        runs/20261129-1624-smollm2/",
    ):
        assert fact in text


async def test_watching_leaves_no_task_behind_when_it_is_cancelled(run: RunFolder) -> None:
    console = terminal()
    async with Feed.open(run.path) as feed:
        before = asyncio.all_tasks()
        watching = asyncio.create_task(show(str(run.path), console=console))
        feed.emit(STREAM[0])
        await seen(console, watching, "20261129")
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert asyncio.all_tasks() == before
    assert printed(console).count("\x1b[?25h") == 1


async def test_a_wrong_target_is_an_error_and_no_panel(tmp_path: Path) -> None:
    console = terminal()
    with pytest.raises(NothingToWatch):
        await show(str(tmp_path / "absent"), console=console)
    assert printed(console) == ""


async def test_a_pipe_gets_one_json_object_a_line(run: RunFolder) -> None:
    async with Feed.open(run.path) as feed:
        for event in STREAM:
            feed.emit(event)
    await run.close()
    output = io.StringIO()
    await pipe(str(run.path), output)
    rows = [json.loads(line) for line in output.getvalue().splitlines()]
    assert len(rows) == len(STREAM) and rows[0]["kind"] == "run_started" and rows[-1]["kind"] == "run_finished"


def test_lines_say_what_went_wrong() -> None:
    view = RunView()
    failed = e.RolloutFailed(
        at_s=1.0, rollout_id="000001-00-03", group_id="000001-00", failure="sandbox", detail="a\nb", will_retry=True
    )
    for event, words in (
        (failed, "rollout 000001-00-03 failed (sandbox, will be retried): a b"),
        (e.Warned(at_s=1.0, text="[red]slow"), "warning: [red]slow"),
        (e.GroupClosed(at_s=1.0, group_id="000001-00", rewards=[0.5, 0.5], flat=True), "000001-00 flat: 0.50 0.50"),
        (e.GroupClosed(at_s=1.0, group_id="g", rewards=[], flat=False, dropped=True), "g dropped: no rewards"),
        (e.StepCommitted(at_s=1.0, step=1, policy_version=1, empty=True, metrics={}), "empty: no update"),
        (
            e.Audited(at_s=1.0, step=1, relative_l2=2.5e-3, worst=0.5, worst_name="lm_head", tolerance=3e-5, ok=False),
            "audit: NOT EXACT, nothing is committed: streamed and one-piece gradient differ by 2.5e-03",
        ),
        (e.RunFinished(at_s=1.0, ok=False, reason="x" * 999), f"stopped: {'x' * 299}…"),
    ):
        view.apply(event)
        line = plain_line(event, view)
        assert line is not None and words in line and "\n" not in line


def test_the_summary_of_a_run_that_died_says_so() -> None:
    view, console = RunView(), paper()
    for event in STREAM[:60]:
        view.apply(event)
    console.print(summary(view))
    assert "ended without a word" in printed(console) and "eval reward  0.16\n" in printed(console)
