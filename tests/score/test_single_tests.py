"""SETA's rewards of single tests, and when a checker's zero is not the agent's."""

import pytest

from thundersync.core.types import Shaping
from thundersync.score.missing_tools import missing_tool, wants_network
from thundersync.score.single_tests import parse_ctrf, shaped_rewards
from thundersync.score.test_logs import Status

RESULTS: dict[str, Status] = {
    "tests/t.py::test_a": "PASSED",
    "tests/t.py::test_b[1]": "PASSED",
    "tests/t.py::test_b[2]": "FAILED",
    "tests/t.py::TestX::test_c": "SKIPPED",
}
ALL: dict[str, Status] = dict.fromkeys(RESULTS, "PASSED")


@pytest.mark.parametrize(
    ("shaping", "weights", "some", "everything"),
    [
        ("binary", {}, 0.0, 1.0),
        ("pass_ratio", {}, 0.5, 1.0),
        ("pass_ratio_with_bonus", {}, 0.5, 2.0),
        ("pass_ratio", {"test_a": 0.75, "test_b": 0.125, "test_c": 0.125}, 0.75, 1.0),
        ("pass_ratio_with_bonus", {"test_a": 3, "test_b": 1}, 0.75, 2.0),
        ("pass_ratio", {"test_a": 0.5, "test_lost": 0.5}, 0.5, 0.5),
        ("binary", {"test_a": 0.5, "test_lost": 0.5}, 0.0, 0.0),
    ],
)
def test_the_three_rewards_with_and_without_weights(
    shaping: Shaping, weights: dict[str, float], some: float, everything: float
) -> None:
    assert shaped_rewards(RESULTS, weights=weights, shaping=shaping)["reward"] == some
    assert shaped_rewards(ALL, weights=weights, shaping=shaping)["reward"] == everything


def test_a_common_test_report_is_read_and_anything_else_is_none() -> None:
    report = b'{"results": {"tests": [{"name": "a", "status": "passed"}, {"name": "b", "status": "other"}]}}'
    assert parse_ctrf(report) == {"a": "PASSED", "b": "ERROR"}
    for torn in (b"", b"[]", b"{}", b'{"results": {"tests": [{"name": "a"}]}}', b'{"results": 5}', b"[" * 5000):
        assert parse_ctrf(torn) == {}


@pytest.mark.parametrize(
    "said",
    [
        "curl: (6) Could not resolve host: astral.sh",
        "E: Unable to locate package curl",
        "W: Failed to fetch http://archive.ubuntu.com/ubuntu  Temporary failure resolving 'archive.ubuntu.com'",
        "/tests/test.sh: line 8: /home/agent/.local/bin/env: No such file or directory",
        "/tests/test.sh: line 10: uvx: command not found",
        "bash: python3: command not found",
        "sh: 1: curl: not found",
        "ERROR: No matching distribution found for pytest==8.4.1",
        "error: Failed to fetch: `https://pypi.org/simple/pytest/`\n  Caused by: dns error",
        "/usr/bin/python3: No module named pytest",
        "fatal: unable to access 'https://github.com/a/b/': Could not resolve host",
        "npm error network request to https://registry.npmjs.org/x failed",
        "curl: (7) Failed to connect to pypi.org port 443 after 1 ms",
        "E: List directory /var/lib/apt/lists/partial is missing. - Acquire",
    ],
)
def test_a_tool_that_could_not_be_had_is_named(said: str) -> None:
    assert missing_tool(f"before\n{said}\nafter")


@pytest.mark.parametrize(
    "said",
    [
        "",
        "FAIL: solution.py not found",
        "curl: (7) Failed to connect to localhost port 8080 after 0 ms: Connection refused",
        "Failed to connect to 127.0.0.1 port 80: Connection refused",
        "/app/x.sh: line 3: ./a.out: No such file or directory",
        "assert 1 == 2",
    ],
)
def test_what_the_agent_left_undone_is_not_a_missing_tool(said: str) -> None:
    assert missing_tool(said) == ""


def test_what_a_script_fetches_is_read_of_it() -> None:
    script = "apt-get update\ncurl -LsSf https://astral.sh/uv/install.sh | sh\nuvx pytest\ncurl http://localhost:1\n"
    assert wants_network(script) == ["astral.sh", "apt", "uv"]
    assert wants_network("pytest /tests\n") == []
