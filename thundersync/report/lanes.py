"""Timelines as the page's script reads them: whole milliseconds, each span told from the end of the one before it,
compressed. The most telling steps come first, and what does not fit is named, not squeezed in.

Between timelines and the page; `page/report.js` has the other end of the format.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from thundersync.report.timeline import KINDS, Span, StepTimeline, Work, running

MOST_STEPS = 60
"""Steps whose events are read at all."""
MOST_BYTES = 2_500_000
"""Of all timelines of a page together, as they stand in the file."""
MOST_LANES = 1024
"""Of one step: whole groups, in their order."""


def telling_steps(seconds: dict[int, float], wanted: Sequence[int] = (), most: int = MOST_STEPS) -> list[int]:
    """Which steps to read, the most telling first: `wanted`, the last, the first, the slowest, the fastest, the median,
    then others evenly. `seconds` is each step's length."""
    steps = sorted(seconds)
    by_time = sorted(steps, key=lambda step: seconds[step])
    if not steps:
        return []
    first = [*(step for step in wanted if step in seconds), steps[-1], steps[0], by_time[-1], by_time[0]]
    first.append(by_time[len(by_time) // 2])
    stride = max(1, -(-len(steps) // max(1, most - len(set(first)))))
    return list(dict.fromkeys([*first, *steps[::stride], *steps]))[: max(most, len(wanted))]


def packed(timeline: StepTimeline, *, notes: bool = True) -> str:
    """One step as base64 of zlib of JSON, in the order that `page/report.js` expects."""
    groups = {group.group_id: index for index, group in enumerate(timeline.groups)}
    shown = [lane for lane in timeline.lanes if _fits(groups[lane.group_id], timeline)]
    texts: dict[str, int] = {"": 0}
    lanes = [
        [
            groups[lane.group_id],
            lane.rollout_id,
            lane.reward,
            lane.state,
            lane.engine,
            lane.attempts,
            _spans(lane.spans, texts if notes else None),
            _spans(lane.backward, None),
            _spans(lane.teacher, None),
        ]
        for lane in shown
    ]
    told: dict[str, Any] = {
        "step": timeline.step,
        "version": timeline.policy_version,
        "ms": _ms(timeline.seconds),
        "committed": timeline.committed,
        "left_out": len(timeline.lanes) - len(shown),
        "groups": [[g.group_id, g.task_id, _maybe_ms(g.closed_s), g.flat, g.dropped] for g in timeline.groups],
        "lanes": lanes,
        "engines": [[engine, _counts(spans)] for engine, spans in timeline.engines.items()],
        "workers": [[worker, _passes(passes)] for worker, passes in sorted(timeline.workers.items())],
        "commit": _maybe_span(timeline.commit),
        "publish": _maybe_span(timeline.publish),
        "texts": list(texts),
    }
    return base64.b64encode(zlib.compress(msgspec.json.encode(told), 9)).decode()


def _fits(group: int, timeline: StepTimeline) -> bool:
    size = max(1, len(timeline.lanes) // max(1, len(timeline.groups)))
    return (group + 1) * size <= max(MOST_LANES, size)


def _spans(spans: Sequence[Span], texts: dict[str, int] | None) -> list[int]:
    """Four numbers a span: kind, gap since the end of the one before, length, text."""
    told, at = [], 0
    for span in spans:
        start, end = _ms(span.start_s), _ms(span.end_s)
        text = texts.setdefault(span.note[:60], len(texts)) if texts is not None else 0
        told += [KINDS.index(span.kind), start - at, end - start, text]
        at = end
    return told


def _counts(spans: Sequence[Span]) -> list[int]:
    """Two numbers a change: gap since the one before, turns being generated from then."""
    told, at = [], 0
    for at_s, count in running(spans):
        told += [_ms(at_s) - at, count]
        at = _ms(at_s)
    return told


def _passes(passes: Sequence[Work]) -> list[int]:
    """Four numbers a pass: gap since the end of the one before, length, tokens, rollouts."""
    told, at = [], 0
    for work in passes:
        start, end = _ms(work.start_s), _ms(work.end_s)
        told += [start - at, end - start, work.tokens, len(work.rollout_ids)]
        at = end
    return told


def _maybe_span(span: tuple[float, float] | None) -> list[int] | None:
    return None if span is None else [_ms(span[0]), _ms(span[1])]


def _maybe_ms(at_s: float | None) -> int | None:
    return None if at_s is None else _ms(at_s)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
