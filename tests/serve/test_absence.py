"""Programs that do not come: told while rollouts wait for them, and by the stall that ends the run."""

from __future__ import annotations

import pytest

from thundersync.errors import StepStalled, ThundersyncError
from thundersync.learn.news import News
from thundersync.serve.absence import Absence


class Watched:
    """An absence on a clock of the test's."""

    def __init__(self, stall_timeout_s: float) -> None:
        self.now_s = 100.0
        self.said: list[str] = []
        self.absence = Absence(
            where=lambda: "http://here:1",
            stall_timeout_s=stall_timeout_s,
            warn=self.said.append,
            clock=lambda: self.now_s,
        )

    def look(self, *, until_s: float, waiting: int = 2) -> None:
        """Look each second until so long after the beginning."""
        while self.now_s < 100.0 + until_s:
            self.now_s += 1.0
            self.absence.look(waiting)


def test_it_is_said_after_a_minute_and_then_after_twice_as_long() -> None:
    watched = Watched(3600.0)
    watched.look(until_s=59)
    assert watched.said == []
    watched.look(until_s=1000)
    assert [text.rpartition(" for ")[2] for text in watched.said] == ["60 s", "120 s", "240 s", "480 s", "960 s"]
    assert watched.said[0] == "2 rollouts wait for a program at http://here:1; none has been there for 60 s"


def test_a_program_that_was_there_begins_the_count_anew() -> None:
    watched = Watched(3600.0)
    watched.look(until_s=59)
    watched.absence.end()
    watched.look(until_s=118)
    assert watched.said == []
    watched.look(until_s=119, waiting=1)
    assert watched.said == ["1 rollout waits for a program at http://here:1; none has been there for 60 s"]


def test_it_ends_by_the_runs_rule_once_it_was_said_and_nothing_else_has_moved() -> None:
    watched = Watched(10.0)
    watched.look(until_s=9)
    assert len(watched.said) == 1
    watched.absence.moved()
    watched.look(until_s=19)
    with pytest.raises(StepStalled, match="nothing moved for 11 s: 2 rollouts wait for a program at http://here:1"):
        watched.look(until_s=20)


def test_a_warning_that_cannot_be_written_is_no_end() -> None:
    def warn(text: str) -> None:
        raise ThundersyncError("the disk is full")

    absence = Absence(where=str, stall_timeout_s=0.0, warn=warn, clock=lambda: 0.0)  # is said at once
    absence.look(1)


async def test_a_step_that_stalls_without_a_program_says_so() -> None:
    news = News(0.01, lambda: "2 rollouts wait for a program")
    with pytest.raises(StepStalled, match="still owes: 000000-00; 2 rollouts wait for a program") as caught:
        while True:
            await news.wait(lambda: "000000-00")
    assert "raise stall_timeout_s" not in caught.value.remedy
