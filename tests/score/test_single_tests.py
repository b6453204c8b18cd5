"""SETA's rewards of single tests, and when a checker's zero is not the agent's."""

import pytest

from thundersync.core.types import Shaping
from thundersync.score.missing_tools import missing_tool, told_of_full_disk, wants_network
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
        "error: Failed to fetch: `https://pypi.org/simple/pytest/`\n  Caused by: operation timed out",
        "  Caused by: HTTP status server error (503 Service Unavailable) for url (https://pypi.org/simple/pytest/)",
        "  Caused by: HTTP status client error (429 Too Many Requests) for url (https://files.pythonhosted.org/a.whl)",
        "  Caused by: Failed to download distribution due to network timeout. Try increasing UV_HTTP_TIMEOUT (30s).",
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: "
        "HTTPSConnectionPool(host='pypi.org', port=443): Read timed out.",
        "after connection broken by 'ReadTimeoutError(\"HTTPSConnectionPool(host='files.pythonhosted.org', port=443): "
        "Read timed out. (read timeout=15)\")': /packages/a.whl",
        "ERROR: HTTP error 503 while getting https://files.pythonhosted.org/packages/a.whl",
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://pypi.org/simple/pytest/",
        "npm error code E429",
        "bash: /usr/local/bin/pytest: /opt/gone/bin/python: bad interpreter: No such file or directory",
    ],
)
def test_a_tool_that_could_not_be_had_is_named(said: str) -> None:
    assert missing_tool(f"before\n{said}\nafter")


@pytest.mark.parametrize(
    "said",
    [
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "  Caused by: failed to write to file `/home/agent/.cache/uv/a`: No space left on device (os error 28)",
        "E: You don't have enough free space in /var/cache/apt/archives/.",
    ],
)
def test_a_full_disk_is_heard_of_and_is_no_missing_tool(said: str) -> None:
    assert told_of_full_disk(f"before\n{said}\nafter")
    assert missing_tool(said) == ""


@pytest.mark.parametrize(
    "said",
    [
        "",
        "FAIL: solution.py not found",
        "curl: (7) Failed to connect to localhost port 8080 after 0 ms: Connection refused",
        "Failed to connect to 127.0.0.1 port 80: Connection refused",
        "/app/x.sh: line 3: ./a.out: No such file or directory",
        "HTTPConnectionPool(host='localhost', port=80): Max retries exceeded with url: / (Caused by NewConnectionError("
        "'<urllib3.connection.HTTPConnection object>: Failed to establish a new connection: [Errno 111] refused'))",
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: http://127.0.0.1:8080/",
        "bash: ./solve.sh: /bin/bsh: bad interpreter: No such file or directory",
        "assert 1 == 2",
    ],
)
def test_what_the_agent_left_undone_is_not_a_missing_tool(said: str) -> None:
    assert missing_tool(said) == ""


@pytest.mark.parametrize(
    ("said", "script", "counts"),
    [
        ("sh: 1: jq: not found", "python3 /app/solution.py", False),
        ("sh: 1: jq: not found", "python3 /app/solution.py | jq .sum", True),
        ("bash: uvx: command not found", "uv run x; uvxx", False),
        ("bash: pip: command not found", "my-pip install x", False),
        ("ERROR: No matching distribution found for pytest-json==2.0", "uv pip install pytest_json==2.0", True),
        ("ERROR: No matching distribution found for numpy", "pip install pytest", False),
        (
            "ERROR: Could not find a version that satisfies the requirement iniconfig>=1 (from pytest) "
            "(from versions: none)",
            "pip install pytest",
            True,
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement leftpad (from versions: none)",
            "check the versions",
            False,
        ),
        ("E: Unable to locate package curl", "apt-get install -y curl", True),
        ("E: Unable to locate package fortune", "apt-get install -y curl", False),
        ("E: Could not open lock file /var/lib/dpkg/lock - open (13: Permission denied)", "apt-get install curl", True),
        ("E: Could not open lock file /var/lib/dpkg/lock - open (13: Permission denied)", "bash /app/run.sh", False),
        ("sh: 1: curl: not found\nsh: 1: jq: not found", "jq . x", True),
        ("curl: (6) Could not resolve host: astral.sh", "", True),
    ],
)
def test_a_package_or_program_counts_if_the_checker_names_it(said: str, script: str, counts: bool) -> None:
    assert missing_tool(said)
    assert bool(missing_tool(said, wanted_by=script)) == counts


def test_what_a_script_fetches_is_read_of_it() -> None:
    script = "apt-get update\ncurl -LsSf https://astral.sh/uv/install.sh | sh\nuvx pytest\ncurl http://localhost:1\n"
    assert wants_network(script) == ["astral.sh", "apt", "uv"]
    assert wants_network("pytest /tests\n") == []
