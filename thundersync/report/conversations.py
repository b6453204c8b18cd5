"""The rollouts worth reading: a few good and a few bad ones, a failed one, as clipped and harmless text.

Between `rollouts/step-*.jsonl.zst` and the page. Which ones is decided from the events alone, so only the lines that
are shown are decoded. What models and commands wrote is hostile: control characters and terminal colours are taken out
here, markup is the page's to escape.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import zstandard

from thundersync.core.replies import turns_by_message
from thundersync.core.types import Failed, Rollout, Scored, Turn
from thundersync.report.record import RunRecord, StepRecord

EACH = 3
"""Best ones, and worst ones."""
LOOK_BACK = 8
"""Steps, from the last, in which they are looked for."""
MOST_CHARS = 4000
"""Of one message; the middle is cut."""
MOST_TURNS = 24
"""Of one conversation; the middle ones are left out."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as it is read."""

    number: int
    """From 1."""
    reply: str
    answer: str
    """What came back: a command's output, a correction; empty after the last turn."""
    facts: str
    asked: str = ""
    """What the policy was shown last where it answers no exchange before: a history that was changed, or another."""
    skipped: int = 0
    """Turns left out right before it."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    task_id: str
    why: str
    """Why it is shown: `best`, `worst`, `failed`."""
    step: int
    """From 0, as in the name of its file."""
    verdict: str
    """`reward 0.75, submitted`, or why its world failed."""
    instruction: str
    opening: int
    """Messages before the instruction: system message, worked examples."""
    exchanges: list[Exchange]
    facts: str


def conversations(record: RunRecord) -> list[Conversation]:
    """The best, the worst and a failed rollout of the last steps; fewer where files are missing or hold no more."""
    shown = [
        _conversation(rollout, step, why.get(rollout.rollout_id, "failed"))
        for step, why in _chosen(record)
        for rollout in _read(record.folder / "rollouts" / f"step-{step:06d}.jsonl.zst", why)
    ]
    order = ("best", "worst", "failed")
    return sorted(shown, key=lambda each: order.index(each.why))


def clean(text: str) -> str:
    """Without terminal colours, and with other control characters made visible."""
    return _CONTROL.sub("\ufffd", _ANSI.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def clipped(text: str, most: int = MOST_CHARS) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _chosen(record: RunRecord) -> list[tuple[int, dict[str, str]]]:
    """By step: the rollouts to show, and why. Tasks differ as far as possible; a later step goes first."""
    recent = [step for step in record.steps.values() if step.scored or step.failed][-LOOK_BACK:]
    scored = [(step, rollout) for step in reversed(recent) for rollout in step.scored]
    chosen: dict[int, dict[str, str]] = {}
    taken: set[str] = set()
    for why, sign in (("best", -1.0), ("worst", 1.0)):
        ordered = sorted(scored, key=lambda each: sign * each[1].reward)
        if not ordered or (taken and ordered[0][1].reward == max(rollout.reward for _, rollout in scored)):
            continue  # all rewards are equal: the worst are the best
        tasks: set[str] = set()
        edge = ordered[0][1].reward
        for step, rollout in [each for each in ordered if each[1].reward == edge] + ordered:
            if len(tasks) == EACH:
                break
            if rollout.task_id not in tasks and rollout.rollout_id not in taken:
                tasks.add(rollout.task_id)
                taken.add(rollout.rollout_id)
                chosen.setdefault(step.opened.step, {})[rollout.rollout_id] = why
    failing: StepRecord | None = next((step for step in reversed(recent) if step.failed), None)
    if failing is not None:
        chosen.setdefault(failing.opened.step, {})[""] = "failed"
    return sorted(chosen.items())


def _read(path: Path, wanted: dict[str, str]) -> Iterable[Rollout]:
    """The wanted rollouts of one file; "" stands for the first failed one."""
    decoder = msgspec.json.Decoder(Rollout)
    left = dict(wanted)
    with contextlib.suppress(OSError, zstandard.ZstdError), path.open("rb") as file:
        stream = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))
        for line in stream:
            if not left:
                return
            name = (
                line[15 : line.find(b'"', 15)].decode(errors="replace") if line.startswith(b'{"rollout_id":"') else ""
            )
            if name not in left and not ("" in left and b'"type":"failed"' in line):
                continue
            with contextlib.suppress(msgspec.DecodeError):
                rollout = decoder.decode(line)
                if rollout.rollout_id in left:
                    del left[rollout.rollout_id]
                    yield rollout
                elif isinstance(rollout.outcome, Failed):
                    del left[""]
                    yield rollout


def _conversation(rollout: Rollout, step: int, why: str) -> Conversation:
    match rollout.outcome:
        case Scored(reward=reward, stop=stop):
            verdict = f"reward {reward:g}, {stop.replace('_', ' ')}"
        case Failed(reason=reason, detail=detail):
            verdict = f"failed ({reason}): {clipped(clean(detail), 300)}"
    turns = turns_by_message(rollout.messages, rollout.turns)
    first = min(turns, default=len(rollout.messages))
    begin = turns[first][0].conversation if first in turns else 0
    before = rollout.messages[begin:first] if turns or not rollout.turns else []  # which replies are its is not told
    instruction = before[-1].content if before else ""
    return Conversation(
        rollout_id=rollout.rollout_id,
        task_id=clean(rollout.task_id),
        why=why,
        step=step,
        verdict=verdict,
        instruction=clipped(clean(instruction)),
        opening=max(0, len(before) - 1),
        exchanges=_exchanges(rollout, turns, instruction),
        facts=", ".join(
            [
                f"{len(rollout.turns)} turn{'s' * (len(rollout.turns) != 1)}",
                f"{rollout.sampled_tokens} tokens sampled",
                f"{rollout.generate_s:.1f} s generating",
                f"{rollout.tool_s:.1f} s in tools",
                f"{rollout.score_s:.1f} s scoring",
                *([f"image {rollout.image[:19]}"] if rollout.image else []),
                *([f"attempt {rollout.attempt}"] if rollout.attempt > 1 else []),
                *([f"{len(rollout.sequences)} sequences"] if len(rollout.sequences) > 1 else []),
            ]
        ),
    )


def _exchanges(rollout: Rollout, turns: Mapping[int, Sequence[Turn]], instruction: str) -> list[Exchange]:
    """The sampled replies, each with what came back: up to the next reply, or to where another conversation begins."""
    messages = rollout.messages
    own = sorted(turns)
    ends = {index for index, message in enumerate(messages) if message.role == "assistant"}
    ends |= {turn.conversation for turn in rollout.turns} | {len(messages)}
    keep, skipped, shown = MOST_TURNS // 2, len(own) - MOST_TURNS, []
    for number, index in enumerate(own):
        if skipped > 0 and keep <= number < keep + skipped:
            continue
        turn = turns[index][0]
        begins = number > 0 and turns[own[number - 1]][0].conversation != turn.conversation
        asked = messages[index - 1].content if begins and index > turn.conversation else ""
        end = min(each for each in ends if each > index)
        shown.append(
            Exchange(
                number=turn.index + 1,
                reply=clipped(clean(messages[index].content)),
                answer=clipped(clean("\n".join(message.content for message in messages[index + 1 : end]))),
                facts="; ".join(_facts(rollout, each) for each in turns[index]),
                asked=clipped(clean(asked)) if asked != instruction else "",
                skipped=skipped if skipped > 0 and number == keep + skipped else 0,
            )
        )
    return shown


def _facts(rollout: Rollout, turn: Turn) -> str:
    tokens = rollout.sequences[turn.sequence].logprobs[turn.start : turn.end]
    facts = [f"{turn.end - turn.start} tokens", f"{turn.generate_s:.1f} s"]
    if tokens:
        facts.append(f"mean logprob {sum(tokens) / len(tokens):.2f}")
    if turn.finish_reason != "stop":
        facts.append(f"ended by {turn.finish_reason}")
    if turn.exit_code is not None:
        facts.append(f"exit code {turn.exit_code} after {turn.tool_s:.2f} s")
    return ", ".join(facts)
