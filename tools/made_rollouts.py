"""The rollouts of a made run as files hold them: conversations, token ids, logprobs; and the tokenizer of those ids.

Beside `tools/made_run.py`. A token is a word with the space before it, so that any text can be made of tokens.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

from thundersync.core.types import Message, Rollout, Scored, TokenSequence, Turn

if TYPE_CHECKING:
    from tools.made_run import Trace

SYSTEM = (
    "You are a careful engineer in a repository at /testbed. Reply with one bash block; submit when the bug is gone."
)
INSTRUCTION = """Resampling drops the first bin when the start lies on a boundary.

    >>> resample([1, 2, 3], start=1)
    [2, 3]          # expected [1, 2, 3]

Make the failing tests pass without changing them."""
THOUGHTS = (
    "The first bin is lost, so a comparison at the boundary must be strict where it should not be. Let me find it.",
    "This is the function the report names. The loop begins behind `start`, which explains the missing bin.",
    "I change the comparison and run the test again.",
    "Two tests pass now, one still fails: it passes an empty list. The guard has to come before the loop.",
    "Everything is green. I look at the diff once more before I submit.",
)
COMMANDS = (
    "grep -n 'start' src/core/resample.py",
    "sed -n 40,58p src/core/resample.py",
    "sed -i '47s/> start/>= start/' src/core/resample.py && python -m pytest tests/test_resample.py -x -q",
    "python - <<'PY'\nfrom core.resample import resample\nprint(resample([], start=1))\nPY",
    "git diff --stat",
)
OUTPUTS = (
    "41:def resample(values, start):\n47:        if value > start:\n52:    return bins[start:]",
    "def resample(values, start):\n    bins = []\n    for value in values:\n        if value > start:\n"
    "            bins.append(value)\n    return bins",
    "..F                                                        [100%]\nFAILED tests/test_resample.py::test_empty - "
    "IndexError: list index out of range\n1 failed, 2 passed in 0.41s",
    "[]",
    " src/core/resample.py | 4 ++--\n 1 file changed, 2 insertions(+), 2 deletions(-)",
)


class Writer:
    """Makes rollouts of traces; its vocabulary grows with the words it meets."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"<unk>": 0}

    def rollout(self, trace: Trace) -> Rollout:
        """What the trace did, in words that fit any repair."""
        dice = random.Random(trace.rollout_id)
        messages = [Message(role="system", content=SYSTEM), Message(role="user", content=INSTRUCTION)]
        ids = self._tokens("\n".join(each.content for each in messages))
        sampled, logprobs, opening, turns = [False] * len(ids), [0.0] * len(ids), len(ids), []
        for index, (_, generate_s, tool_s) in enumerate(trace.turns):
            which = min(index, 4) if index < len(trace.turns) - 1 else 4
            command, output, start = COMMANDS[which], OUTPUTS[which], len(ids)
            text = f"{THOUGHTS[which]}\n\n```bash\n{command}\n```"
            reply = self._tokens(text)
            ids += reply
            sampled += [True] * len(reply)
            logprobs += [
                -min(6.0, dice.expovariate(7) if dice.random() < 0.9 else dice.expovariate(0.7)) for _ in reply
            ]
            turns.append(
                Turn(
                    index=index, sequence=0, start=start, end=len(ids), finish_reason="stop", policy_version=trace.step,
                    command=command, output=output, exit_code=int(which == 2), generate_s=generate_s, tool_s=tool_s,
                    cached_tokens=int(start * 0.93),
                )
            )  # fmt: skip
            told = f"exit code {int(which == 2)}\n{output}"
            messages += [Message(role="assistant", content=text), Message(role="user", content=told)]
            answer = self._tokens(told)
            ids += answer
            sampled += [False] * len(answer)
            logprobs += [0.0] * len(answer)
        sequence = TokenSequence(token_ids=ids, sampled=sampled, logprobs=logprobs, prompt_tokens=opening)
        return Rollout(
            rollout_id=trace.rollout_id, group_id=trace.group_id, task_id=trace.task_id, policy_version=trace.step,
            messages=messages, sequences=[sequence], turns=turns,
            outcome=Scored(reward=trace.reward or 0.0, stop="submitted"), started_s=trace.started_s,
            generate_s=sum(turn.generate_s for turn in turns), tool_s=sum(turn.tool_s for turn in turns),
            score_s=trace.score_s,
        )  # fmt: skip

    def tokenizer(self) -> dict[str, Any]:
        """As `tokenizer.json` holds it: a word per id."""
        model = {"type": "WordLevel", "vocab": self._ids, "unk_token": "<unk>"}
        empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
        return {"version": "1.0", "added_tokens": [], **empty, "model": model}

    def _tokens(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in re.findall(r" ?\w+|\s|[^\w\s]", text)]
