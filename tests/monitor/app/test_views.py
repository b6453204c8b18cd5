"""Every view, drawn at every moment of a made run and in every size: it fits, and it says what it should."""

import itertools
import math
from collections.abc import Callable, Iterable

import msgspec
import pytest
from rich.cells import cell_len

from thundersync.core.types import Failed, Message, Scored, TokenSequence, Turn
from thundersync.monitor import events as e
from thundersync.monitor.app.boxes import boxes
from thundersync.monitor.app.conversation import conversation, surprise
from thundersync.monitor.app.engines import engines
from thundersync.monitor.app.frame import foot, tabs, title
from thundersync.monitor.app.known import VIEWS, Known, Lines
from thundersync.monitor.app.news import news
from thundersync.monitor.app.open_groups import open_groups
from thundersync.monitor.app.overlap import MARKS, overlap
from thundersync.monitor.app.overview import overview
from thundersync.monitor.app.views import drawn
from thundersync.monitor.archive import Transcript
from tools.made_run import Shape, made_run

RUN = list(made_run(Shape(steps=2, max_steps=4, groups=3, size=4, concurrency=9, ended=False)))
CROWD = list(
    made_run(Shape(steps=0, max_steps=1, groups=12, size=16, concurrency=150, engines=4, workers=6, ended=False))
)
ROLLOUT = "000001-00-00"


def known_of(events: Iterable[e.AnyEvent]) -> Known:
    known = Known()
    for event in events:
        known.apply(event)
    return known


LIVE = known_of(RUN)


def words(view: Callable[[Known, int, int, float], Lines], known: Known, width: int = 78, height: int = 21) -> str:
    return "\n".join(line.plain for line in view(known, width, height, known.view.at_s))


def transcript(**fields: object) -> Transcript:
    text = "look\n" * 3
    given: dict[str, object] = {
        "messages": [
            Message(role="system", content="be careful"),
            Message(role="user", content="mend it"),
            Message(role="assistant", content=text),
            Message(role="tool", content="\x1b[31mboom\x07 " + "x" * 300),
        ],
        "sequences": [
            TokenSequence(
                token_ids=[1, 2, 3, 4, 5, 6],
                sampled=[False, False, True, True, True, True],
                logprobs=[0.0, 0.0, -0.01, -0.5, -2.0, -9.0],
                prompt_tokens=2,
            )
        ],
        "turns": [
            Turn(
                index=0, sequence=0, start=2, end=6, finish_reason="length", policy_version=1, command="ls",
                output="x", exit_code=2, generate_s=1.5, tool_s=0.2,
            )
        ],
        "texts": {3: "look", 4: " here", 5: "\n", 6: "unlikely"},
    }  # fmt: skip
    given |= fields
    return Transcript(rollout_id=ROLLOUT, group_id=ROLLOUT[:-3], task_id="mend", policy_version=1, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "height"), [(58, 15), (78, 21), (98, 27), (198, 57)])
def test_every_view_fits_at_every_moment(width: int, height: int) -> None:
    for stream in (RUN, CROWD):
        known = Known()
        for number, event in enumerate(stream):
            known.apply(event)
            if number % 613 and number != len(stream) - 1:
                continue
            known.cursor.rollout = ROLLOUT
            known.transcripts[ROLLOUT] = transcript() if number % 2 else None
            for view, tokens in itertools.product(VIEWS, (False, True)):
                known.cursor.tokens = tokens
                lines = drawn(view, known, width=width, height=height, now_s=event.at_s + 1.0)
                assert 0 < len(lines) <= height, view
                assert {cell_len(line.plain) for line in lines} == {width}, view
                assert not any("\n" in line.plain for line in lines)
            for line in (title(known, width, event.at_s), foot(known, width)):
                assert cell_len(line.plain) <= width
        assert cell_len(tabs(known, 78).plain) <= 78


def test_a_view_of_nothing_says_so() -> None:
    for view in VIEWS:
        assert drawn(view, Known(), width=78, height=21, now_s=0.0)


def test_shapes_tell_apart_without_colours() -> None:
    assert len({shape for shape, _, _ in MARKS.values()}) == len(MARKS)
    assert len({word for _, _, word in MARKS.values()}) == len(MARKS)
    assert all(cell_len(shape) == 1 for shape, _, _ in MARKS.values())


def test_the_overview_says_how_far_what_is_idle_and_what_was_learned() -> None:
    said = words(overview, LIVE)
    for fact in ("step 3/4 ━", "ETA", "12 rollouts", "engines", "trainer", "idle", "reward", "◉ eval", "mismatch"):
        assert fact in said
    assert "███" in said


def test_the_overlap_has_a_lane_for_each_rollout_engine_and_worker() -> None:
    said = words(overlap, LIVE)
    for fact in ("step 3 of 4", "● live", "╷0s", "g00 00", "g01 00", "engine 0", "engine 1", "trainer 0", "trainer 1"):
        assert fact in said
    assert "▆" in said and "▂" in said
    known = known_of(RUN)
    known.cursor.step = 0
    earlier = words(overlap, known, height=25)
    assert "step 1 of 4" in earlier and "of the backward ran before the last reward" in earlier
    assert "◆" in earlier and "●" in earlier and "■" in earlier
    assert earlier.count("  0.") + earlier.count("  1.") >= 8  # rewards at the lanes' ends


def test_a_crowd_of_lanes_scrolls_and_never_past_its_end() -> None:
    known = known_of(CROWD)
    first = words(overlap, known)
    assert "rollouts 1 to " in first and "of 192" in first
    known.cursor.lane = 10**6
    last = words(overlap, known)
    assert "g11" in last and "to 192 of 192" in last


def test_groups_show_the_chosen_ones_rollouts_and_the_parts_they_keep_open() -> None:
    known = known_of(RUN)
    known.cursor.group, known.cursor.member = 1, 2
    said = words(open_groups, known)
    chosen = list(known.view.groups.values())[1]
    assert "gradient parts of open groups" in said and "pieces waiting" in said
    assert f"── {chosen.task_id}"[:20] in said
    assert "› " in said and "› 01-02" in said


def test_a_conversation_is_read_with_its_figures() -> None:
    known = known_of(RUN)
    known.cursor.rollout = ROLLOUT
    known.transcripts[ROLLOUT] = transcript(outcome=Scored(reward=0.5, stop="submitted", rewards={"tests": 0.5}))
    said = words(conversation, known)
    for fact in (
        "reward 0.50 submitted  tests 0.5", "1 turns, 4 tokens", "turn 1", "logprob -2.88", "exit 2", "cut: length",
        "policy│ look", "world │ mend it", "system│ be careful", "boom",
    ):  # fmt: skip
        assert fact in said, fact
    assert "\x1b" not in said and "\x07" not in said
    known.cursor.tokens = True
    tokens = conversation(known, 78, 21, 0.0)
    shown = "\n".join(line.plain for line in tokens)
    assert "look here" in shown and "unlikely" in shown
    looks = {line.plain[each.start : each.end]: each.style for line in tokens for each in line.spans}
    assert len({looks["look"], looks[" here"], looks["unlikely"]}) == 3


def test_a_turns_figures_stand_above_its_own_reply_and_no_other() -> None:
    told = [("system", "s"), ("user", "u"), ("assistant", "an example"), ("user", "do"), ("assistant", "mine")]
    fork = [("user", "u"), ("assistant", "put into its mouth"), ("user", "again"), ("assistant", "other")]
    known = known_of(RUN)
    known.cursor.rollout = ROLLOUT
    for recorded in (True, False):
        said = [msgspec.convert({"role": role, "content": text}, Message) for role, text in told + fork * recorded]
        turns = [
            Turn(index=0, sequence=0, start=2, end=4, finish_reason="stop", policy_version=1, exit_code=7,
                 message=4 if recorded else None),
            Turn(index=1, sequence=1, start=2, end=4, finish_reason="stop", policy_version=1, message=8,
                 conversation=5),
        ][: 1 + recorded]  # fmt: skip
        known.transcripts[ROLLOUT] = transcript(messages=said, turns=turns)
        lines = words(conversation, known, height=30).splitlines()
        at = {each.content: next(i for i, line in enumerate(lines) if line.endswith(each.content)) for each in said}
        assert [i + 1 for i, line in enumerate(lines) if "turn 1 " in line] == [at["mine"]]
        assert [i + 1 for i, line in enumerate(lines) if "turn 2 " in line] == ([at["other"]] if recorded else [])
        assert sum("told again" in line for line in lines) == recorded


def test_a_conversation_that_goes_on_or_failed_says_so() -> None:
    known = known_of(RUN)
    known.cursor.rollout = ROLLOUT
    assert "reading rollout" in words(conversation, known)
    known.transcripts[ROLLOUT] = None
    assert "nothing can be read" in words(conversation, known)
    known.transcripts[ROLLOUT] = transcript(attempt=2)
    assert "still running" in words(conversation, known) and "attempt 2" in words(conversation, known)
    known.transcripts[ROLLOUT] = transcript(outcome=Failed(reason="sandbox", detail="it died"), texts={})
    assert "× sandbox: it died" in words(conversation, known)
    known.cursor.tokens = True
    assert "⟨3⟩⟨4⟩" in words(conversation, known)


def test_surprise_is_high_where_a_token_was_unlikely() -> None:
    assert surprise([-0.01] * 8 + [-9.0], 9) == "▁▁▁▁▁▁▁▁█"
    assert surprise([math.nan], 4) == "?"


def test_engines_show_speed_cache_and_prefix_hits() -> None:
    said = words(engines, LIVE)
    for fact in ("tok/s", "prefix hits", "KV asked", "tokens per second", "policy v2", "trainer   passes"):
        assert fact in said
    old = Known()
    old.apply(
        e.Gauges(
            at_s=1.0, engine_busy=0.5, trainer_busy=0.0, generate_running=3, tools_running=0, queue_pieces=0,
            open_slots=0, loop_lag_ms=0.1, tokens_per_s=12.0,
        )
    )  # fmt: skip
    assert "3 requests in flight" in words(engines, old)
    assert "event loop 0.1 ms late" in words(engines, old)
    old.apply(
        e.Gauges(
            at_s=2.0, engine_busy=0.5, trainer_busy=0.0, generate_running=3, tools_running=0, queue_pieces=0,
            open_slots=0, loop_lag_ms=0.1, tokens_per_s=12.0, loop_lag_p50_ms=0.4, loop_lag_p99_ms=2.5,
            loop_lag_max_ms=410.0,
        )
    )  # fmt: skip
    assert "event loop 0.4 ms late, p99 2.5, at worst 410.0" in words(engines, old)


def test_sandboxes_show_what_runs_and_how_long_it_takes() -> None:
    said = words(boxes, LIVE)
    for fact in ("docker sandboxes", "with a command", "median", "command", "checker", "longest running commands"):
        assert fact in said


def test_sandboxes_are_counted_where_one_has_started_and_nowhere_else() -> None:
    name = "000000-00-00"
    known = known_of([
        msgspec.structs.replace(RUN[0], runtime="docker"),
        e.StepOpened(at_s=0.0, step=0, policy_version=0, group_ids=[name[:-3]], task_ids=["t"], group_size=1),
        e.RolloutStarted(at_s=0.0, rollout_id=name, group_id=name[:-3], task_id="t"),
        e.TurnStarted(at_s=1.0, rollout_id=name, turn=0),
    ])  # fmt: skip
    known.view.at_s = 2.0
    assert words(boxes, known).startswith("0 docker sandboxes")
    known.apply(e.SandboxStarted(at_s=2.0, rollout_id=name, start_s=0.25))
    said = words(boxes, known)
    assert said.startswith("1 docker sandboxes") and "250 ms" in said
    known.apply(e.RolloutFailed(at_s=3.0, rollout_id=name, group_id="", failure="engine", detail="", will_retry=True))
    assert words(boxes, known).startswith("0 docker sandboxes")
    known.apply(msgspec.structs.replace(RUN[0], runtime="none", name="other"))
    known.apply(e.StepOpened(at_s=4.0, step=0, policy_version=0, group_ids=["g"], task_ids=["t"], group_size=1))
    assert "this run has no sandboxes" in words(boxes, known)


def test_an_engine_without_a_figure_has_a_dash() -> None:
    gauge = e.EngineGauge(
        running=1, busy=1.0, tokens_per_s=0.0, prompt_tokens_per_s=0.0, cached_share=0.0, kv_asked=0.5
    )
    known = Known()
    known.apply(
        e.Gauges(
            at_s=1.0, engine_busy=1.0, trainer_busy=0.0, generate_running=1, tools_running=0, queue_pieces=0,
            open_slots=0, loop_lag_ms=0.1, tokens_per_s=0.0, engines=[gauge],
        )
    )  # fmt: skip
    assert words(engines, known).splitlines()[1].split()[-5:] == ["1", "–", "0", "–", "50%"]


def test_warnings_and_failures_are_told_in_order() -> None:
    known = known_of(RUN)
    known.apply(e.Warned(at_s=known.view.at_s, text="the very last\x1b[2J"))
    known.apply(e.RunFinished(at_s=known.view.at_s + 1, ok=False, reason="WorkerLost: gone"))
    lines = words(news, known).splitlines()
    assert "the run stopped: WorkerLost: gone" in lines[-1] and "the very last" in lines[-2]
    assert "\x1b" not in "".join(lines)
    assert "nothing to warn of" in words(news, Known())


def test_another_run_at_the_same_place_replaces_the_first() -> None:
    known = known_of(RUN)
    (started,) = (event for event in RUN if isinstance(event, e.RunStarted))
    known.apply(e.RunStarted(**{**{f: getattr(started, f) for f in started.__struct_fields__}, "name": "next"}))
    assert known.view.run is not None and known.view.run.name == "next"
    assert not known.view.commits and not known.timelines.steps and not known.failures
