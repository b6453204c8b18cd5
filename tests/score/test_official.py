"""The official package is asked where it is installed, in a process of its own, and left alone where it is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from thundersync.score.official import available, official_statuses


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that has the official one's place and form (version 5: a registry of functions)."""
    folder = tmp_path / "swebench" / "harness" / "log_parsers"
    folder.mkdir(parents=True)
    for each in (tmp_path / "swebench", tmp_path / "swebench" / "harness", folder):
        (each / "__init__.py").touch()
    (folder / "__init__.py").write_text(
        "import enum\nclass S(enum.Enum):\n    PASSED = 'PASSED'\n"
        "PARSER_REGISTRY = {'parse_log_one': lambda log, spec: {line: S.PASSED.value for line in log.split()},\n"
        "    'parse_log_torn': lambda log, spec: 1 / 0}\n"
    )
    (folder / "python.py").write_text("def parse_log_two(log, spec):\n    return {'two': 'FAILED'}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    available.cache_clear()
    yield folder
    available.cache_clear()


async def test_its_parsers_are_found_wherever_its_versions_keep_them(package: Path) -> None:
    assert await official_statuses("a b", "parse_log_one") == {"a": "PASSED", "b": "PASSED"}
    assert await official_statuses("a b", "parse_log_two") == {"two": "FAILED"}


async def test_what_it_cannot_read_is_left_to_our_own(package: Path) -> None:
    for parser in ("parse_log_unknown", "parse_log_torn", "pytest_lines"):
        assert await official_statuses("a", parser) is None


async def test_without_the_package_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thundersync.score.official.available", lambda: False)
    assert await official_statuses("a", "parse_log_one") is None
