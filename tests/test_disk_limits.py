"""How much a task's sandbox may write: what the run gives, or what the task names where that is less."""

import pytest

from tests.fakes import a_task
from thundersync.assembly import within
from thundersync.config import SandboxConfig
from thundersync.config_file import config_from


@pytest.mark.parametrize(
    ("given", "named", "had"),
    [(0, 0, 0), (0, 10240, 10240), (2048, 0, 2048), (2048, 10240, 2048), (2048, 100, 100)],
)
def test_a_sandbox_may_write_what_the_run_gives_or_what_its_task_names_where_that_is_less(
    given: int, named: int, had: int
) -> None:
    config = config_from({"model": {"name": "m"}, "sandbox": {"disk_mib": given}})
    (task,) = within(config, [a_task(disk_mib=named)])
    assert task.disk_mib == had


def test_by_default_a_run_names_no_limit() -> None:
    assert SandboxConfig().disk_mib == 0
