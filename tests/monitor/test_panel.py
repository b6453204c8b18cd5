import io
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tests.monitor.fake_run import fake_run
from thundersync.monitor import events as e
from thundersync.monitor.chart import columns
from thundersync.monitor.panel import render, rewards_text, span
from thundersync.monitor.shapes import GLYPHS
from thundersync.monitor.state import RunView

STREAM = list(fake_run(steps=12, groups=4, size=8))
CROWD = list(fake_run(steps=3, groups=16, size=16, seed=3))


def view_of(events: list[e.AnyEvent]) -> RunView:
    view = RunView()
    for event in events:
        view.apply(event)
    return view


def lines(view: RunView, *, width: int = 80, height: int = 23) -> list[str]:
    return render(view, now_s=view.at_s + 1, width=width, height=height).plain.split("\n")


def check(view: RunView, width: int, height: int) -> None:
    drawn = lines(view, width=width, height=height)
    assert {cell_len(line) for line in drawn} == {width}
    assert len(drawn) <= height


def test_a_terminal_of_80_by_24_shows_the_facts_of_a_step() -> None:
    view = view_of(STREAM[:2600])
    drawn = "\n".join(lines(view))
    for fact in (
        "thundersync  20261129-1624-smollm2",
        "SmolLM2-135M-Instruct · stream",
        f"step {view.made + 1}/12",
        f"policy v{view.policy_version}",
        "ETA ",
        "engines  █",
        "trainer  █",
        "tok/s",
        "open slots",
        "◉ eval 0.16",
        f"commit {view.made}  reward",
        "! step 3: trainer idle",
        "·wait ▸generate $tool ?score ◇queue ◆backward ●done =flat ×fail ↻retry",
    ):
        assert fact in drawn
    for group in view.groups.values():
        assert group.task_id in drawn
    assert re.search(r"make-folder-03 +[●◆◇?$▸·×=↻]{8} ", drawn)
    check(view, 80, 23)


def test_every_state_has_its_own_shape_and_word() -> None:
    assert len({glyph for glyph, _, _ in GLYPHS.values()}) == len(GLYPHS)
    assert len({word for _, _, word in GLYPHS.values()}) == len(GLYPHS)
    assert all(cell_len(glyph) == 1 for glyph, _, _ in GLYPHS.values())


@pytest.mark.parametrize(("width", "height"), [(60, 18), (80, 23), (100, 30), (200, 60)])
def test_every_size_is_filled_exactly_at_every_moment(width: int, height: int) -> None:
    for stream in (STREAM, CROWD):
        view = RunView()
        check(view, width, height)
        for number, event in enumerate(stream):
            view.apply(event)
            if number % 397 == 0:
                check(view, width, height)
        check(view, width, height)


def test_of_many_groups_the_moving_ones_are_shown_and_the_others_counted() -> None:
    drawn = "\n".join(lines(view_of(CROWD[:1500])))
    assert re.search(r"and \d+ more: ", drawn)
    assert "▸" in drawn


def test_the_end_says_so() -> None:
    view = view_of(STREAM)
    drawn = "\n".join(lines(view))
    assert "finished" in drawn and "eval 0.16 → 0.63" in drawn and "ETA" not in drawn
    view.apply(e.RunFinished(at_s=view.at_s, ok=False, reason="WorkerLost: the trainer\ndied"))
    assert "× WorkerLost: the trainer died" in "\n".join(lines(view))


@given(st.text(max_size=90), st.floats(), st.floats())
@settings(max_examples=80, deadline=None)
def test_no_text_and_no_number_breaks_the_frame(text: str, number: float, other: float) -> None:
    view = view_of(STREAM[:400])
    group = next(iter(view.groups))
    at_s = view.at_s
    for event in (
        e.Warned(at_s=at_s, text=text),
        e.StepOpened(at_s=at_s, step=9, policy_version=8, group_ids=[group], task_ids=[text], group_size=3),
        e.RolloutScored(
            at_s=at_s,
            rollout_id=f"{group}-00",
            group_id=group,
            reward=number,
            stop="submitted",
            turns=1,
            sampled_tokens=1,
            score_s=0.0,
        ),
        e.EvalFinished(at_s=at_s, policy_version=3, reward_mean=other, scored=1, failed=0, seconds=0.0),
        e.Gauges(
            at_s=at_s,
            engine_busy=number,
            trainer_busy=other,
            generate_running=1,
            tools_running=1,
            queue_pieces=1,
            open_slots=1,
            loop_lag_ms=0.0,
            tokens_per_s=number,
        ),
    ):
        view.apply(event)
        check(view, 80, 23)
    metrics = {"reward_mean": number, "step_s": other, "grad_norm": other}
    view.apply(e.StepCommitted(at_s=at_s, step=9, policy_version=9, empty=True, metrics=metrics))
    check(view, 80, 23)


def test_the_panel_prints_in_a_plain_terminal_without_colour() -> None:
    console = Console(width=80, height=24, no_color=True, force_terminal=True, record=True, file=io.StringIO())
    console.print(render(view_of(STREAM[:900]), now_s=view_of(STREAM[:900]).at_s + 1))
    assert console.export_text().splitlines() == lines(view_of(STREAM[:900]))


def test_the_chart_fills_with_the_run() -> None:
    assert columns([1.0, 0.5], total=4, offset=0, width=8, rows=2, low=0.0, high=1.0) == ["██      ", "████····"]
    assert columns([1.0], total=4, offset=2, width=4, rows=1, low=0.0, high=1.0) == ["  █·"]
    assert columns([math.nan, 1.0], total=2, offset=0, width=2, rows=1, low=0.0, high=1.0) == [" █"]
    many = columns([0.0] * 50 + [1.0] * 50, total=100, offset=0, width=10, rows=1, low=0.0, high=1.0)
    assert many == ["▁▁▁▁▁█████"]


def test_durations_and_rewards_read_well() -> None:
    assert [span(s) for s in (0.4, 59.0, 61.0, 3600.0, 7500.0)] == ["0s", "59s", "1m 01s", "1h 00m", "2h 05m"]
    assert rewards_text([0.0, 1.0]) == "0.00 1.00"
    assert rewards_text([0.0] * 12 + [1.0] * 4) == "12×0.00  4×1.00"
