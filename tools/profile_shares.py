"""Where a process of a run spends its time, from stacks that py-spy sampled: shares of busy time, by purpose.

    python -m thundersync run configs/quickstart.toml --plain &
    py-spy record -r 50 -d 120 -f raw -o worker.txt -p PID     # of `thundersync.learn.worker`; or the coordinator's
    python tools/profile_shares.py worker.txt [--least 0.01]

A sample counts for the innermost of the functions below that is on its stack, else for its innermost function of
ours, else for its outermost one. Starting up (imports, loading the model) is left out. Reads a file; measures nothing.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

START = ("_find_and_load", "load_policy", "load_reference", "_setup (")
"""On the stack of what happens once."""
ATTENTION = ("_attend", "_after", "_attention", "_joined")
"""Of `learn/blocks.py`: attention over several blocks, also where a backward makes it again."""
PURPOSES = {
    "the model's backward": ("_engine_run_backward",),
    "the model's forward": ("modeling_", "torch/nn/", "learn/head.py", *(f"{each} (" for each in ATTENTION)),
}
"""Model compute: what the mathematics of a step asks for, whoever does it."""
FRAME = re.compile(r"^(?P<function>.+) \((?P<file>[^():]+)(:\d+)?\)$")


def shares(lines: Iterable[str]) -> tuple[int, Counter[str]]:
    """Samples of a running step in all, and of each purpose or function."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.strip().rpartition(" ")
        if stack and not any(mark in stack for mark in START):
            found[_purpose(stack.split(";"))] += int(count)
    return found.total(), found


def _purpose(frames: list[str]) -> str:
    for frame in reversed(frames):
        for name, marks in PURPOSES.items():
            if any(mark in frame for mark in marks):
                return name
        if "thundersync/" in frame or "sandboxes/" in frame:
            match = FRAME.match(frame)
            return f"{match['function']} ({match['file']})" if match else frame
    return next((frame for frame in frames if not frame.startswith(("process ", "thread "))), "nothing")


def table(total: int, found: Mapping[str, int], least: float) -> str:
    rows = [f"{total} samples of a running step"]
    for name, count in sorted(found.items(), key=lambda item: -item[1]):
        if count >= least * total:
            rows.append(f"{count / total:7.1%}  {name}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stacks", type=Path)
    parser.add_argument("--least", type=float, default=0.01, help="share of the smallest row")
    args = parser.parse_args()
    total, found = shares(args.stacks.read_text().splitlines())
    print(table(total, found, args.least))


if __name__ == "__main__":
    main()
