"""How single tests of a terminal task ended, and SETA's rewards made of that. Values in, values out.

Source of the three rewards: SETA (camel-ai/seta-release): `binary`, `pass_ratio`, `pass_ratio_with_bonus`.
"""

import math
from collections.abc import Mapping
from typing import assert_never

import msgspec

from thundersync.core.types import Shaping
from thundersync.score.test_logs import Status, merged

_CTRF: dict[str, Status] = {"passed": "PASSED", "failed": "FAILED", "skipped": "SKIPPED"}


def parse_ctrf(content: bytes) -> dict[str, Status]:
    """Statuses by test name of a Common Test Report; empty if it is none."""
    try:
        report = msgspec.json.decode(content)
        tests = report["results"]["tests"]
        return merged((str(test["name"]), _CTRF.get(str(test["status"]), "ERROR")) for test in tests)
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return {}


def counts_as_passed(status: Status) -> bool:
    """As Terminal-Bench counts: skipped and expected failures too, unexpected passes not."""
    return status in ("PASSED", "XFAIL", "SKIPPED")


def shaped_rewards(
    results: Mapping[str, Status], *, weights: Mapping[str, float], shaping: Shaping
) -> dict[str, float]:
    """`reward` and what it was made of. A skipped test has not passed. `results` must not be empty.

    `weights` are by test function: a parametrised test passes if all its cases do, and a test that has a weight but no
    result has not passed. Without weights every result weighs the same.
    """
    passed = {name: status in ("PASSED", "XFAIL") for name, status in results.items()}
    if weights:
        named = {name: [ok for each, ok in passed.items() if _function(each) == _function(name)] for name in weights}
        total = math.fsum(weights.values())
        ratio = math.fsum(weight for name, weight in weights.items() if named[name] and all(named[name])) / total
    else:
        ratio = sum(passed.values()) / len(passed)
    everything = all(passed.values()) and ratio > 1 - 1e-9
    match shaping:
        case "binary":
            reward = float(everything)
        case "pass_ratio" | "task":
            reward = ratio
        case "pass_ratio_with_bonus":
            reward = ratio + float(everything)
        case _:
            assert_never(shaping)
    return {"reward": reward, "pass_ratio": ratio, "all_passed": float(everything)}


def _function(name: str) -> str:
    """`tests/test_x.py::TestA::test_b[case]` -> `test_b`: how weights name tests."""
    return name.partition("[")[0].rpartition("::")[2].rpartition("/")[2].strip()
