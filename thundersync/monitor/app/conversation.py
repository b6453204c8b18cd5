"""One rollout as a conversation: who said what, what ran, how sure the model was, what it was worth. A view, pure.

Sampled tokens can be shown by their probability: a shape of its own (underline, reverse) beside each colour.
"""

import math
import statistics
import textwrap
from collections.abc import Iterator

from rich.text import Text

from thundersync.core.replies import turns_by_message
from thundersync.core.types import Failed, Scored, Turn
from thundersync.monitor.app.known import Known, Lines
from thundersync.monitor.archive import Transcript
from thundersync.monitor.panel import span
from thundersync.monitor.shapes import BLUE, DIM, GREEN, LINE, ORANGE, RED, SKY, YELLOW, one_line, padded

SURE = (
    (0.9, DIM, "over 90 %"),
    (0.5, SKY, "over 50 %"),
    (0.1, f"{YELLOW} underline", "over 10 %"),
    (0.0, f"bold reverse {RED}", "less"),
)
"""How tokens look by the probability they were sampled with."""
_BARS = "▁▂▃▄▅▆▇█"
_ROLES = {"system": (DIM, "system"), "user": (ORANGE, "world"), "tool": (ORANGE, "tool"), "assistant": (SKY, "policy")}
GUTTER = 8


def conversation(known: Known, width: int, height: int, now_s: float) -> Lines:
    """`height` lines of at most `width` cells: a head that stays, and the conversation that scrolls below it."""
    name = known.cursor.rollout
    if name is None:
        return [Text("no rollout is chosen: choose one in groups (3), then press enter", DIM)]
    if name not in known.transcripts:
        return [Text(f"reading rollout {name} ...", DIM)]
    found = known.transcripts[name]
    if found is None:
        words = (
            f"nothing can be read of rollout {name} now: it has not begun (again), it waits for its evaluation to end, "
            "or the file it was written to is not there"
        )
        return [Text(line, DIM) for line in textwrap.wrap(words, width)]
    head = _head(found, width)
    body = token_lines(found, width) if known.cursor.tokens and found.sequences else message_lines(found, width)
    room = max(1, height - len(head) - 1)
    known.cursor.line = max(0, min(known.cursor.line, len(body) - room))
    shown = body[known.cursor.line : known.cursor.line + room]
    shown += [Text()] * (room - len(shown))
    return [*head, *shown, _foot(known, found, len(body), room, width)]


def _head(found: Transcript, width: int) -> Lines:
    first = Text.assemble((found.rollout_id, "bold"), "  ", (one_line(found.task_id), SKY))
    if found.attempt > 1:
        first.append(f"  attempt {found.attempt}", ORANGE)
    outcome = found.outcome
    line = Text()
    if isinstance(outcome, Scored):
        line.append(f"reward {outcome.reward:.2f}", f"bold {GREEN if outcome.reward > 0 else BLUE}")
        line.append(f" {outcome.stop}", DIM)
        parts = {key: value for key, value in outcome.rewards.items() if key != "reward"}
        line.append("".join(f"  {key} {value:g}" for key, value in list(parts.items())[:4]), DIM)
    elif isinstance(outcome, Failed):
        line.append(f"× {outcome.reason}: {one_line(outcome.detail)}", RED)
    else:
        line.append("still running", f"bold {SKY}")
    sampled = sum(turn.end - turn.start for turn in found.turns)
    generate_s, tool_s = (sum(getattr(turn, key) for turn in found.turns) for key in ("generate_s", "tool_s"))
    facts = f"   {len(found.turns)} turns, {sampled} tokens   generated {span(generate_s)}, tools {span(tool_s)}"
    line.append(facts, DIM)
    if len(found.sequences) > 1:
        line.append(f"   forked into {len(found.sequences)} sequences", YELLOW)
    return [padded(first, width), padded(line, width)]


def message_lines(found: Transcript, width: int) -> Lines:
    """The messages as text; before each sampled reply its turn's figures and a bar per stretch of its tokens."""
    lines: Lines = []
    turns = turns_by_message(found.messages, found.turns)
    anew = {turn.conversation for turn in found.turns} - {0}
    for index, message in enumerate(found.messages):
        style, word = _ROLES[message.role]
        if index in anew:
            lines.append(padded(Text("═══ from here on: told again, and gone on with in another way ", YELLOW), width))
        lines += [_turn(found, turn, width) for turn in turns.get(index, ())]
        first = True
        for paragraph in message.content.splitlines() or [""]:
            for piece in _wrapped(paragraph, width - GUTTER):
                label = f"{word if first else '':<{GUTTER - 2}}│ "
                body = "" if message.role == "assistant" else DIM
                lines.append(Text().append(label, style if first else LINE).append(piece, body))
                first = False
    return lines


def token_lines(found: Transcript, width: int) -> Lines:
    """Only what was sampled, token by token, each in the look of its probability."""
    lines: Lines = []
    for turn in found.turns:
        lines.append(_turn(found, turn, width))
        line, room = Text().append("policy│ ", SKY), width - GUTTER
        used = 0
        for text, logprob in _sampled(found, turn):
            style = next(look for least, look, _ in SURE if math.exp(min(0.0, logprob)) >= least)
            for index, piece in enumerate(text.split("\n")):
                if index or used + len(piece) > room:
                    lines.append(line)
                    line, used = Text().append("      │ ", LINE), 0
                shown = "".join(character if character.isprintable() else "·" for character in piece)
                line.append(shown[:room], style)
                used += len(shown)
        lines.append(line)
        if turn.command:
            code = "" if turn.exit_code is None else f"exit {turn.exit_code}"
            lines.append(Text().append("  tool│ ", ORANGE).append(f"{code}, {span(turn.tool_s)}", DIM))
    return lines


def _turn(found: Transcript, turn: Turn, width: int) -> Text:
    logprobs = [logprob for _, logprob in _sampled(found, turn)]
    line = Text().append(f"── turn {turn.index + 1} ", f"bold {LINE}")
    if logprobs:
        line.append(f"{len(logprobs)} tokens, {turn.generate_s:.1f} s", DIM)
        line.append("  logprob ", DIM).append(f"{statistics.fmean(logprobs):.2f} ", "bold").append(
            surprise(logprobs, max(8, min(32, width - 62))), SKY
        )
    if turn.exit_code is not None:
        line.append(f"  exit {turn.exit_code}", GREEN if turn.exit_code == 0 else RED)
    if turn.finish_reason != "stop":
        line.append(f"  cut: {turn.finish_reason}", YELLOW)
    line.append(" ")
    return padded(line.append("─" * max(0, width - line.cell_len), LINE), width)


def surprise(logprobs: list[float], room: int) -> str:
    """A bar per stretch of tokens: the higher, the less likely its least likely token was."""
    each = max(1, math.ceil(len(logprobs) / room))
    worst = [min(logprobs[at : at + each]) for at in range(0, len(logprobs), each)]
    return "".join(_BARS[min(7, int(-value * 2))] if math.isfinite(value) else "?" for value in worst)


def _sampled(found: Transcript, turn: Turn) -> Iterator[tuple[str, float]]:
    """Text and logprob of a turn's tokens; where no tokenizer was at hand, their ids."""
    if turn.sequence >= len(found.sequences):
        return
    sequence = found.sequences[turn.sequence]
    ids, logprobs = sequence.token_ids[turn.start : turn.end], sequence.logprobs[turn.start : turn.end]
    for token, logprob in zip(ids, logprobs, strict=False):
        yield found.texts.get(token, f"⟨{token}⟩"), logprob


def _foot(known: Known, found: Transcript, total: int, room: int, width: int) -> Text:
    last = min(total, known.cursor.line + room)
    if known.cursor.tokens and not found.sequences:
        return padded(Text("no tokens are known of it yet", DIM), width)
    line = Text().append(f"lines {known.cursor.line + 1} to {last} of {total}", DIM)
    if known.cursor.tokens:
        line.append("   probability  ", DIM)
        for _, look, word in SURE:
            line.append(word, look).append("  ")
    else:
        line.append("   bars: the higher, the less likely the token was", DIM)
    return padded(line, width)


def _wrapped(paragraph: str, room: int) -> list[str]:
    text = "".join(character if character.isprintable() else " " for character in paragraph.expandtabs(4))
    return textwrap.wrap(text, room, drop_whitespace=False, replace_whitespace=False) or [""]
