"""The app in a terminal of 80 x 24, driven by keys."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from thundersync.core.types import Scored
from thundersync.errors import ThundersyncError
from thundersync.monitor import events as e
from thundersync.monitor.app.app import Monitor, watch
from thundersync.monitor.app.known import VIEWS
from thundersync.monitor.app.source import Source
from thundersync.monitor.archive import Archive, Transcript, sampled_ids
from thundersync.monitor.ear import NothingToWatch
from thundersync.monitor.feed import Feed
from thundersync.monitor.keys import make_keys, run_keys, viewer_keys
from thundersync.monitor.timeline import Timelines
from thundersync.rundir import RunFolder
from tools.made_run import Shape, made_run, write_run

SHAPE = Shape(steps=3, max_steps=3, groups=2, size=4, concurrency=5)
LIVE = Shape(steps=1, max_steps=3, groups=2, size=4, concurrency=5, ended=False)
STREAM = list(made_run(LIVE))


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("over"), SHAPE)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunFolder]:
    async with RunFolder.create(tmp_path, "run", "", False) as folder:
        yield folder


def screen(app: Monitor) -> str:
    return "\n".join(str(app.query_one(f"#{name}", Static).render()) for name in ("head", "body", "foot"))


async def until(pilot: Pilot[ThundersyncError], app: Monitor, true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await pilot.pause(0.02)
            app.draw()


async def test_a_finished_run_is_replayed_in_seven_views(over: Path) -> None:
    app = Monitor(Source(str(over)))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, app, lambda: app.known.view.finished)
        await until(pilot, app, lambda: "finished" in screen(app) and "commits" in screen(app))
        for key, view, fact in (
            ("2", "overlap", "engine 0"), ("3", "groups", "groups closed"), ("5", "engines", "prefix hits"),
            ("6", "sandboxes", "longest running"), ("7", "warnings", "step 2: the trainer idled"),
            ("1", "overview", "reward"),
        ):  # fmt: skip
            await pilot.press(key)
            assert VIEWS[app.known.cursor.view] == view and fact in screen(app), view
            lines = screen(app).splitlines()
            assert len(lines) <= 24 and all(len(line) <= 78 for line in lines)
        await pilot.press("right")
        assert VIEWS[app.known.cursor.view] == "overlap"
        await pilot.press("shift+tab")
        assert VIEWS[app.known.cursor.view] == "overview"
        await pilot.press("q")
    assert app.return_value is None


async def test_earlier_steps_are_scrubbed_to_and_read_where_they_are_forgotten(over: Path) -> None:
    app = Monitor(Source(str(over)))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, app, lambda: app.known.view.finished)
        await pilot.press("2")
        assert "step 3 of 3" in screen(app)
        del app.known.timelines.steps[0]  # as in a long run
        await pilot.press("left", "left")
        assert app.known.cursor.step == 0
        await until(pilot, app, lambda: "step 1 of 3" in screen(app) and "trainer 1" in screen(app))
        await pilot.press("left")
        assert app.known.cursor.step == 0
        await pilot.press("down", "down", "pagedown", "up")
        await pilot.press("end")
        assert app.known.cursor.step is None and "step 3 of 3" in screen(app)


async def test_a_step_that_was_watched_is_read_again_once_it_is_forgotten(over: Path) -> None:
    app = Monitor(Source(str(over)))
    async with app.run_test(size=(80, 24)) as pilot:
        for event in (event for event in made_run(SHAPE) if event.at_s):
            if isinstance(event, e.StepCommitted):
                app.draw()  # while the step is open, as who stays attached does
            app.known.apply(event)
        await until(pilot, app, lambda: app.known.view.finished)
        await pilot.press("2", "left")
        for _ in range(3):  # forgotten, read, and forgotten again
            app.known.timelines.steps.pop(1, None)
            await until(pilot, app, lambda: 1 in app.known.timelines.steps and "step 2 of 3" in screen(app))


async def test_a_rollout_is_chosen_read_and_looked_at_token_by_token(over: Path) -> None:
    app = Monitor(Source(str(over)))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, app, lambda: app.known.view.finished)
        await pilot.press("3", "down", "right", "right", "enter")
        assert app.known.cursor.rollout == "000002-01-02"
        await until(pilot, app, lambda: "reward" in screen(app) and "system│" in screen(app))
        await pilot.press("t")
        assert "probability" in screen(app) and "first bin is lost" in screen(app) and "⟨" not in screen(app)
        await pilot.press("down", "pagedown")
        assert app.known.cursor.line > 1
        await pilot.press("left")
        assert app.known.cursor.rollout == "000002-01-01" and app.known.cursor.line == 0
        await until(pilot, app, lambda: "000002-01-01" in screen(app) and "turn 1" in screen(app))


async def test_who_attaches_late_sees_the_whole_step_live_and_the_next_events(run: RunFolder) -> None:
    async with Feed.open(run.path) as feed:
        for event in STREAM:
            feed.emit(event)
        app = Monitor(Source(feed.endpoint), clock=lambda: STREAM[-1].at_s)
        async with app.run_test(size=(80, 24)) as pilot:
            whole = Timelines()
            for event in STREAM:
                whole.apply(event)
            await pilot.press("2")
            await until(pilot, app, lambda: app.known.timelines.open == whole.open)
            await until(pilot, app, lambda: "● live" in screen(app))
            await pilot.press("left")  # a step that ended before this viewer came
            await until(pilot, app, lambda: "step 1 of 3" in screen(app) and "of the backward" in screen(app))
            feed.emit(e.Warned(at_s=STREAM[-1].at_s, text="something new"))
            await pilot.press("7")
            await until(pilot, app, lambda: "something new" in screen(app))


async def test_a_rollout_that_lives_is_read_through_the_feed(run: RunFolder, over: Path) -> None:
    written = Archive(over).rollout("000001-00-00")
    assert written is not None and isinstance(written.outcome, Scored)
    turns = [written]

    def look(name: str) -> Transcript | None:
        return turns[-1] if name == "000001-00-00" else None

    async with Feed.open(run.path) as feed:
        feed.tell_live(look, lambda found: dict.fromkeys(sampled_ids(found), "word "))
        for event in STREAM:
            feed.emit(event)
        app = Monitor(Source(str(run.path)))
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, app, lambda: app.known.view.groups)
            await pilot.press("3", "enter", "t")
            await until(pilot, app, lambda: "word word" in screen(app))


async def test_a_run_that_is_started_again_is_followed(tmp_path: Path) -> None:
    first, second = list(made_run(SHAPE)), list(made_run(Shape(steps=3, max_steps=5, groups=2, size=4, start=2)))
    async with RunFolder.create(tmp_path, "run", "", False) as run, Feed.open(run.path) as feed:
        for event in first[: len(first) // 2]:
            feed.emit(event)
        app = Monitor(Source(str(tmp_path / "run")))
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, app, lambda: app.known.view.at_s == first[len(first) // 2 - 1].at_s)
            await feed.close()
            await run.close()
            await pilot.pause(0.1)
            async with (
                RunFolder.create(tmp_path, "run", "", True) as again,
                Feed.open(again.path) as feed_again,
            ):
                for event in second:
                    feed_again.emit(event)
                await until(pilot, app, lambda: app.known.view.finished is not None)
                assert app.known.view.resumed_at > 0 and app.is_running
                assert app.known.view.max_steps == 5


async def test_wrong_keys_end_the_app_with_what_to_do(run: RunFolder, tmp_path: Path) -> None:
    ours, _ = make_keys(tmp_path / "ours")
    _, theirs = make_keys(tmp_path / "theirs")
    async with Feed.open(run.path, bind="tcp://127.0.0.1:*", keys=run_keys(ours)) as feed:
        app = Monitor(Source(feed.remote, viewer_keys(theirs)))
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, app, lambda: app.return_value is not None or not app.is_running)
    assert app.return_value is not None and "not those of the run" in str(app.return_value)


async def test_waiting_is_said_and_a_folder_without_a_run_is_refused_before_the_screen_changes(tmp_path: Path) -> None:
    app = Monitor(Source(f"ipc://{tmp_path}/nobody"))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, app, lambda: "nobody answers yet" in screen(app))
    with pytest.raises(NothingToWatch):
        await watch(str(tmp_path), keys=None, console=None)  # type: ignore[arg-type]
