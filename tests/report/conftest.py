"""One small made run for the tests that only read it."""

from pathlib import Path

import pytest

from tests.report.made_run import MadeRun, make_run
from thundersync.report.record import RunRecord, read_run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made"), MadeRun(engines=2, workers=2))


@pytest.fixture
def record(made: Path) -> RunRecord:
    return read_run(made)
