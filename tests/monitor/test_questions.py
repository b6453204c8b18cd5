"""What a viewer can ask beyond events: a step's past, a rollout word for word."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.monitor.viewer import Viewer, view_of
from thundersync.monitor import answers
from thundersync.monitor import archive as archive_module
from thundersync.monitor import events as e
from thundersync.monitor.archive import Archive, Transcript, events_of, sampled_ids
from thundersync.monitor.ear import FeedLost, ask
from thundersync.monitor.feed import Feed
from thundersync.monitor.timeline import Doing, Timelines
from thundersync.rundir import RunFolder
from tools.made_run import Shape, made_run, write_run

SHAPE = Shape(steps=2, max_steps=3, groups=2, size=3, concurrency=4, evals=False)
RUN = list(made_run(SHAPE))
OPENED = [index for index, event in enumerate(RUN) if isinstance(event, e.StepOpened)]


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made"), SHAPE)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunFolder]:
    async with RunFolder.create(tmp_path, "run", "", False) as folder:
        yield folder


async def asked(feed: Feed, what: str, which: str) -> bytes:
    return await ask(feed.endpoint, answers.question(what, which))


def test_a_step_is_read_from_its_opening_to_the_next(over: Path) -> None:
    archive = Archive(over)
    assert list(events_of(archive.step_lines(0))) == RUN[OPENED[0] : OPENED[1]]
    assert list(events_of(archive.step_lines(1))) == RUN[OPENED[1] :]
    assert archive.step_lines(2) == b""


def test_what_is_written_later_is_found_too_and_a_torn_line_is_not(tmp_path: Path) -> None:
    archive, file = Archive(tmp_path), tmp_path / "events.jsonl"
    assert archive.step_lines(0) == b""
    lines = [e.to_line(event) for event in RUN]
    file.write_bytes(b"".join(lines[: OPENED[0] + 2]) + lines[OPENED[0] + 2][:9])
    assert len(list(events_of(archive.step_lines(0)))) == 2
    with file.open("ab") as more:
        more.write(b"\n" + b"".join(lines[OPENED[0] + 3 :]))
    assert list(events_of(archive.step_lines(1))) == RUN[OPENED[1] :]
    assert len(list(events_of(archive.step_lines(0)))) == OPENED[1] - OPENED[0] - 1
    again = list(made_run(Shape(steps=2, max_steps=3, groups=2, size=3, seed=9, start=1, evals=False)))
    with file.open("ab") as more:
        more.write(b"".join(map(e.to_line, again)))
    worked_twice = list(events_of(archive.step_lines(1)))
    assert worked_twice[0] == next(event for event in again if isinstance(event, e.StepOpened))


def test_threads_that_ask_at_once_all_get_whole_steps(over: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, reads = threading.Barrier(2), archive_module._whole_lines

    def together(file: BinaryIO) -> bytes:
        with contextlib.suppress(threading.BrokenBarrierError):
            waiting.wait(0.2)  # both have read the same place in the file before either goes on
        return reads(file)

    monkeypatch.setattr(archive_module, "_whole_lines", together)
    archive, told = Archive(over), dict[int, list[e.AnyEvent]]()

    def ask_for(step: int) -> None:
        told[step] = list(events_of(archive.step_lines(step)))

    threads = [threading.Thread(target=ask_for, args=(step,)) for step in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {0: RUN[OPENED[0] : OPENED[1]], 1: RUN[OPENED[1] :]}
    assert list(events_of(archive.step_lines(0))) == told[0]


def test_a_rollout_is_read_with_the_texts_of_its_tokens(over: Path) -> None:
    archive = Archive(over)
    found = archive.rollout("000001-01-02")
    assert found is not None and found.rollout_id == "000001-01-02" and found.turns
    texts = archive.token_texts(found)
    sequence, turn = found.sequences[0], found.turns[0]
    spoken = "".join(texts[token] for token in sequence.token_ids[turn.start : turn.end])
    assert spoken == found.messages[2].content
    assert set(texts) == sampled_ids(found)
    for unknown in ("000001-09-00", "000077-00-00", "eval-000001-00-00", "nonsense", "../../etc-passwd-00"):
        assert archive.rollout(unknown) is None


async def test_the_feed_answers_of_the_past_and_of_what_lives(run: RunFolder, over: Path) -> None:
    (run.path / "rollouts" / "step-000000.jsonl.zst").write_bytes(
        (over / "rollouts/step-000000.jsonl.zst").read_bytes()
    )
    written = Archive(over).rollout("000001-00-00")
    assert written is not None
    seen: list[str] = []

    def look(name: str) -> Transcript | None:
        seen.append(name)
        return written if name == "000001-00-00" else None

    async with Feed.open(run.path) as feed:
        for event in RUN:
            feed.emit(event)
        viewer = Viewer(feed.endpoint)
        await viewer.heard(RUN[-1])
        assert list(events_of(answers.step_lines(await asked(feed, answers.STEP, "0")))) == RUN[OPENED[0] : OPENED[1]]
        assert answers.step_lines(await asked(feed, answers.STEP, "9")) == b""
        past = answers.transcript(await asked(feed, answers.ROLLOUT, "000000-01-01"))
        assert past is not None and past.rollout_id == "000000-01-01" and past.outcome is not None
        assert answers.transcript(await asked(feed, answers.ROLLOUT, "000001-00-00")) is None
        feed.tell_live(look, lambda found: dict.fromkeys(sampled_ids(found), "x"))
        live = answers.transcript(await asked(feed, answers.ROLLOUT, "000001-00-00"))
        assert live is not None and live.messages == written.messages and set(live.texts.values()) == {"x"}
        assert seen == ["000001-00-00"]
    await asyncio.wait_for(viewer.task, 60)


async def test_no_question_ends_the_feed(run: RunFolder) -> None:
    (run.path / "rollouts" / "step-000000.jsonl.zst").write_bytes(b"damaged")

    def look(name: str) -> Transcript | None:
        raise RuntimeError("a list changed while it was read")

    async with Feed.open(run.path) as feed:
        feed.emit(RUN[0])
        assert answers.transcript(await asked(feed, answers.ROLLOUT, "000000-00-00")) is None
        feed.tell_live(look, lambda found: {})
        assert answers.transcript(await asked(feed, answers.ROLLOUT, "000000-00-00")) is None
        for odd in ("", "x" * 400, "-", "step"):
            assert answers.step_lines(await asked(feed, odd, odd)) == b""
        feed.emit(RUN[1])
        viewer = Viewer(feed.endpoint)
        await viewer.heard(RUN[1])
    await asyncio.wait_for(viewer.task, 60)
    with pytest.raises(FeedLost, match="did not answer"):
        await ask(f"ipc://{run.path}/nobody", answers.question(answers.STEP, "0"), limit_s=0.5)


async def test_viewers_that_come_and_go_at_random_change_nothing(run: RunFolder) -> None:
    """Two at a time, attached and gone at the moments that a seed gives, asking as they go."""
    dice, stream = random.Random(5), RUN
    viewers: list[Viewer | None] = [None, None]
    async with Feed.open(run.path) as feed:
        for number, event in enumerate(stream):
            feed.emit(event)
            place = number % 2
            if dice.random() < 0.04:
                gone, viewers[place] = viewers[place], None
                if gone is not None:
                    await gone.leave()
                else:
                    viewers[place] = Viewer(dice.choice([str(run.path), feed.endpoint]))
                if dice.random() < 0.5:
                    await asked(feed, answers.STEP, "0")
            if dice.random() < 0.1:
                await asyncio.sleep(0)
        for viewer in viewers:
            if viewer is not None:
                await viewer.heard(stream[-1])
                assert view_of(viewer.told) == view_of(stream)
                await viewer.leave()
    assert [e.from_line(line) for line in run.events.read_bytes().splitlines()] == stream


def timelines_of(events: list[e.AnyEvent]) -> Timelines:
    known = Timelines()
    for event in events:
        known.apply(event)
    return known


def test_a_lane_tells_what_a_rollout_did_without_gaps() -> None:
    step = timelines_of(RUN).steps[0]
    for lane in step.lanes.values():
        spans = lane.spans()
        assert spans[0].start_s == step.opened_s
        assert all(one.end_s == other.start_s for one, other in pairwise(spans))
        assert spans[-1].doing in (Doing.DONE, Doing.FLAT) and lane.reward is not None
        assert {each.doing for each in spans} >= {Doing.START, Doing.GENERATE, Doing.TOOL, Doing.SCORE}
    assert step.ended_s is not None and step.worked_s is not None and step.opened_s < step.worked_s < step.ended_s
    total_s = sum(step.busy_s(worker, step.ended_s) for worker in step.passes)
    assert 0 < step.sooner_s() <= total_s


def test_replies_that_are_sampled_side_by_side_are_generated_until_the_last_has_ended() -> None:
    name = "000000-00-00"
    known = timelines_of([
        e.StepOpened(at_s=0.0, step=0, policy_version=0, group_ids=[name[:-3]], task_ids=["t"], group_size=1),
        e.RolloutStarted(at_s=0.0, rollout_id=name, group_id=name[:-3], task_id="t"),
        *(e.TurnStarted(at_s=1.0, rollout_id=name, turn=turn) for turn in (0, 1)),
        _generated(name, 0, 2.0),
        e.ToolStarted(at_s=3.0, rollout_id=name, turn=0, command="ls"),
        _generated(name, 1, 6.0),
        e.ToolFinished(at_s=8.0, rollout_id=name, turn=0, exit_code=0, tool_s=5.0),
    ])  # fmt: skip
    spans = known.steps[0].lanes[name].spans()
    at = {moment: next(s.doing for s in spans if s.start_s <= moment < s.end_s) for moment in (0.5, 2.5, 5.0, 7.0, 9.0)}
    assert list(at.values()) == [Doing.START, Doing.GENERATE, Doing.GENERATE, Doing.TOOL, Doing.WAIT]


def test_an_aborted_request_ends_where_it_was_aborted_and_counts_as_no_turn() -> None:
    name = "000000-00-00"
    known = timelines_of([
        e.StepOpened(at_s=0.0, step=0, policy_version=0, group_ids=[name[:-3]], task_ids=["t"], group_size=1),
        e.RolloutStarted(at_s=0.0, rollout_id=name, group_id=name[:-3], task_id="t"),
        e.TurnStarted(at_s=1.0, rollout_id=name, turn=0),
        e.TurnAborted(at_s=2.0, rollout_id=name, turn=0),
        e.TurnStarted(at_s=3.0, rollout_id=name, turn=1),
        _generated(name, 1, 4.0),
        e.ToolStarted(at_s=5.0, rollout_id=name, turn=1, command="ls"),
        e.ToolFinished(at_s=6.0, rollout_id=name, turn=1, exit_code=0, tool_s=1.0),
    ])  # fmt: skip
    lane = known.steps[0].lanes[name]
    assert [(span.start_s, span.doing) for span in lane.spans()] == [
        (0.0, Doing.START), (1.0, Doing.GENERATE), (2.0, Doing.WAIT), (3.0, Doing.GENERATE), (4.0, Doing.WAIT),
        (5.0, Doing.TOOL), (6.0, Doing.WAIT),
    ]  # fmt: skip
    assert lane.turns == 1
    for event in (
        e.RolloutFailed(at_s=7.0, rollout_id=name, group_id=name[:-3], failure="engine", detail="", will_retry=True),
        e.RolloutStarted(at_s=8.0, rollout_id=name, group_id=name[:-3], task_id="t", attempt=2),
        *(e.TurnStarted(at_s=9.0 + turn, rollout_id=name, turn=turn) for turn in (0, 1)),
    ):
        known.apply(event)
    assert lane.turns == 2  # what the first attempt gave up is not taken off the second's


def _generated(name: str, turn: int, at_s: float) -> e.TurnGenerated:
    return e.TurnGenerated(
        at_s=at_s, rollout_id=name, turn=turn, sampled_tokens=5, prompt_tokens=7, cached_tokens=0, generate_s=1.0,
        finish_reason="stop",
    )  # fmt: skip


def test_who_comes_late_and_reads_the_past_knows_the_same() -> None:
    dice = random.Random(1)
    for _ in range(8):
        late = OPENED[1] + dice.randrange(1, len(RUN) - OPENED[1])
        # The snapshot has kept the opening and the latest of each rollout; the rest is read from the archive.
        known = timelines_of([RUN[OPENED[1]], *RUN[max(OPENED[1], late - 20) : late]])
        known.read(RUN[OPENED[1] : late])
        for event in RUN[late:]:
            known.apply(event)
        assert known.steps[1] == timelines_of(RUN).steps[1]


def test_an_older_step_that_is_read_stands_beside_the_open_one() -> None:
    known = timelines_of(RUN[OPENED[1] : -20])
    opened = known.open
    assert opened is not None and opened.step == 1 and list(known.steps) == [1]
    known.read(RUN[OPENED[0] : OPENED[1]])
    assert known.open is opened and known.steps[0] == timelines_of(RUN).steps[0]
    known.read([])
    known.read(RUN[:1])
    assert set(known.steps) == {0, 1}


def test_a_resumed_run_forgets_the_steps_it_works_again_and_no_order_raises() -> None:
    started = RUN[0]
    assert isinstance(started, e.RunStarted)
    known = timelines_of(RUN[:-5])
    known.apply(e.RunStarted(**{f: getattr(started, f) for f in started.__struct_fields__} | {"start_step": 1}))
    assert list(known.steps) == [0] and known.open is None
    dice, shuffled = random.Random(3), RUN[:]
    dice.shuffle(shuffled)
    for lane in (lane for step in timelines_of(shuffled).steps.values() for lane in step.lanes.values()):
        assert lane.spans() or lane.marks


def test_a_viewer_keeps_few_steps_however_long_a_run_is() -> None:
    known = Timelines(keep=3)
    for step in range(50):
        known.apply(
            e.StepOpened(at_s=float(step), step=step, policy_version=0, group_ids=["g"], task_ids=["t"], group_size=1)
        )
    assert list(known.steps) == [47, 48, 49] and known.open is known.steps[49]
