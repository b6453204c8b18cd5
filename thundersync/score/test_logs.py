"""Reads how single tests ended out of what a test run printed. Text in, statuses out; runs nothing.

Place in the flow: between a checker's output and its verdict. A log is the work of code under judgement, so that only
what the test framework itself prints at its known place counts, and two answers for one test are no pass.
"""

import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from msgspec import Struct

Status: TypeAlias = Literal["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"]
START, END, CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code:"

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HEADER = re.compile(r"=+ short test summary info =+")
_STATUS = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S.*)")
_STATUS_LAST = re.compile(r"(\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(\s+\[\s*\d+%\])?\s*")
_RESULTS = re.compile(r"Results \([\d.]+s\):")
_TOTALS = re.compile(
    r"(?:=+ )?(?:((?:\d+ (?:subtests )?[a-z]+(?:, )?)+)|no tests ran) in [\d.]+ ?s(?:econds)?(?: \([\d:]+\))?(?: =+)?"
)
_COUNT = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|xpassed)")
_PROGRESS = re.compile(r"\[\s*\d+%\]")


class TestLog(Struct, frozen=True, kw_only=True):
    """How the tests of one run ended."""

    __test__ = False

    statuses: dict[str, Status]
    totals: dict[str, int] | None = None
    """The framework's own counts at the run's end, by pytest's words; None: it printed none."""
    counted: bool = False
    """Whether this framework prints such counts."""
    exit_code: int | None = None
    """Of the test command, where the script says it."""
    text: str = ""
    """What lay between the marks."""

    def status(self, test_id: str) -> Status | None:
        """Of one listed test; None if the log does not name it.

        Published ids are cut at the first space of a parameter: then all tests that begin so must agree.
        """
        if test_id in self.statuses:
            return self.statuses[test_id]
        if _PROGRESS.fullmatch(test_id):  # two published rows list what their parser took for an id
            return "PASSED" if f"\nPASSED {test_id}" in f"\n{self.text}" else None
        if test_id.count("[") <= test_id.count("]"):
            return None
        begun = {status for name, status in self.statuses.items() if name.startswith(f"{test_id} ")}
        return (begun - {"PASSED"} or begun).pop() if begun else None

    @property
    def contradiction(self) -> str:
        """Why this log cannot be what the framework printed; empty if it can."""
        if self.counted:
            if self.totals is None:
                return "the run printed no totals: it did not come to its end"
            named = sum(1 for each in self.statuses.values() if each == "PASSED")
            if named > self.totals.get("passed", 0):
                return f"{named} tests are named PASSED, and the run counted {self.totals.get('passed', 0)}"
        bad = any(status in ("FAILED", "ERROR") for status in self.statuses.values())
        if self.exit_code not in (None, 0) and not bad:
            return f"the test command ended with {self.exit_code}, and its log names no failure"
        return ""


def read_log(output: str, parser: str) -> TestLog | None:
    """What `parser` finds between the marks of `output`; None if the tests never began.

    `parser` is `pytest_lines` or the name of an official parser; an unknown one is read as pytest's summary.
    """
    start = re.search(rf"^.*{re.escape(START)}.*\n", output, re.MULTILINE)
    if start is None:
        return None
    ends = list(re.finditer(rf"^.*{re.escape(END)}.*$", output[start.end() :], re.MULTILINE))
    text = output[start.end() :]
    after = ""
    if ends:
        text, after = text[: ends[-1].start()], text[ends[-1].start() :]
    code = re.search(rf"{re.escape(CODE)}\s*(-?\d+)", after)
    text = _COLOURS.sub("", text.replace("\r\n", "\n"))
    pairs = _PARSERS.get(parser, _pytest_summary)(text)
    pytest = parser not in ("parse_log_django", "parse_log_sympy")
    return TestLog(
        statuses=merged(pairs),
        totals=totals(text) if pytest else None,
        counted=pytest,
        exit_code=int(code[1]) if code else None,
        text=text,
    )


def merged(pairs: Iterable[tuple[str, Status]]) -> dict[str, Status]:
    """One status per test; where a log gives two, the worse: a forged line does not win over the true one."""
    order: tuple[Status, ...] = ("XFAIL", "PASSED", "XPASS", "SKIPPED", "ERROR", "FAILED")
    found: dict[str, Status] = {}
    for name, status in pairs:
        found[name] = max(found.get(name, status), status, key=order.index)
    return found


def totals(text: str) -> dict[str, int] | None:
    """Pytest's counts in the last line that has their form; what tests print earlier does not matter."""
    lines = [line.strip() for line in text.splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if match := _TOTALS.fullmatch(lines[index]):
            return _counts(match[1] or "")
        if _RESULTS.fullmatch(lines[index]):  # the form of a widespread plugin: one count a line
            return _counts(" ".join(lines[index + 1 :]))
    return None


def _counts(text: str) -> dict[str, int]:
    return {"error" if word == "errors" else word: int(number) for number, word in _COUNT.findall(text)}


def summary_lines(text: str, *, first: bool = False) -> list[tuple[str, Status]]:
    """The lines of pytest's short summary, names with their spaces, reasons cut off.

    Below the last header: earlier ones are what tests printed. `first`: below the first one to the very end, as
    Terminal-Bench reads it, whose scripts add a summary of their own.
    """
    headers = list(_HEADER.finditer(text))
    if not headers:
        return []
    below = text[headers[0 if first else -1].end() :]
    pairs: list[tuple[str, Status]] = []
    for line in below.splitlines():
        if not first and _TOTALS.fullmatch(line.strip()):
            break
        if match := _STATUS.fullmatch(line.strip()):
            status: Status = match[1]  # type: ignore[assignment]
            name = match[2] if status == "PASSED" else match[2].split(" - ")[0]
            pairs.append((name.strip(), status))
    return pairs


def _pytest_summary(text: str) -> list[tuple[str, Status]]:
    return summary_lines(text)


def _pytest_lines(text: str) -> list[tuple[str, Status]]:
    """`id STATUS`, one a line, as `pytest --verbose` prints them; ids with spaces are lost, as when rows are made."""
    found: list[tuple[str, Status]] = []
    for line in text.splitlines():
        if match := _STATUS_LAST.fullmatch(line):
            status: Status = match[2]  # type: ignore[assignment]
            found.append((match[1], status))
    return found


def _pytest_options(text: str) -> list[tuple[str, Status]]:
    """Parameters that are long paths are known by their last part."""
    found: list[tuple[str, Status]] = []
    for name, status in summary_lines(text):
        if match := re.fullmatch(r"(.*?)\[(.*)\](.*)", name, re.DOTALL):
            option = match[2]
            if option.startswith("/") and not option.startswith("//") and "*" not in option:
                option = "/" + option.split("/")[-1]
            name = f"{match[1]}[{option}]{match[3]}"
        found.append((name, status))
    return found


def _matplotlib(text: str) -> list[tuple[str, Status]]:
    """Its ids name mouse buttons by the number in rows, by the name in newer logs."""
    known = {"MouseButton.LEFT": "1", "MouseButton.RIGHT": "3"}
    pairs = summary_lines(text)
    for word, number in known.items():
        pairs = [(name.replace(word, number), status) for name, status in pairs]
    return pairs


def _seaborn(text: str) -> list[tuple[str, Status]]:
    return summary_lines(text) or _pytest_lines(text)


def _sympy(text: str) -> list[tuple[str, Status]]:
    """`test_x ok`, and failures again in a list of their own."""
    words: dict[str, Status] = {"ok": "PASSED", "F": "FAILED", "E": "ERROR", "s": "SKIPPED", "f": "XFAIL"}
    found: list[tuple[str, Status]] = []
    for line in text.splitlines():
        if match := re.fullmatch(r"(test_\S*) (ok|F|E|s|f)(?:\s.*)?", line.strip()):
            found.append((match[1], words[match[2]]))
        elif match := re.fullmatch(r"_+ \S*:(test_\S+) _+", line.strip()):
            found.append((match[1], "FAILED"))
    return found


def _django(text: str) -> list[tuple[str, Status]]:
    """`name (class) ... ok`, where the name may be a first line's docstring and output may come before the word."""
    words: dict[str, Status] = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}
    found: list[tuple[str, Status]] = []
    open_test = ""
    for raw in text.splitlines():
        line = raw.strip()
        name, dots, said = line.rpartition(" ... ")
        if dots:
            open_test = name
        elif line.endswith(" ..."):
            open_test, said = line.removesuffix(" ..."), ""
        else:
            said = line
        if match := re.fullmatch(r"(FAIL|ERROR): (.+)", line):
            found.append((match[2].split(" ... ")[0], words[match[1]]))
        elif open_test and (word := re.search(r"(?:^|\W)(ok|FAIL|ERROR|OK|skipped\b.*)$", said)):
            last = word[1]
            if last == "OK":
                continue
            found.append((open_test, "SKIPPED" if last.startswith("skipped") else words[last]))
            open_test = ""
    return found


_PARSERS: dict[str, Callable[[str], list[tuple[str, Status]]]] = {
    "pytest_lines": _pytest_lines,
    "parse_log_pytest": _pytest_summary,
    "parse_log_pytest_v2": _pytest_summary,
    "parse_log_pytest_options": _pytest_options,
    "parse_log_matplotlib": _matplotlib,
    "parse_log_seaborn": _seaborn,
    "parse_log_sympy": _sympy,
    "parse_log_django": _django,
}
