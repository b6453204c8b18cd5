"""Rank processes that the tests of several trainer workers share."""

from collections.abc import Iterator

import pytest

from tests.learn.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def rank_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    processes = RankProcesses(3, tmp_path_factory.mktemp("meetings"))
    yield processes
    processes.close()
