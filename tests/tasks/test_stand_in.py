"""Published tasks and repairs in containers, on an image made here that stands in for the ones they name."""

import hashlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import platformdirs
import pytest

from sandboxes import DockerRuntime
from tests.docker_daemon import DockerDaemon
from tests.tasks.folders import make_folder
from tests.tasks.repairs import a_row
from tests.tasks.test_load import SHARED
from tests.tasks.test_terminal_bench import make
from thundersync.tasks.check import TaskCheck, TaskReport
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.load import find_all
from thundersync.tasks.standin import StandIn
from thundersync.tasks.swe import smith_task

pytestmark = [pytest.mark.docker, pytest.mark.slow]
IMAGE = "thundersync/stand-in:test"
RECIPE = Path(__file__).parents[2] / "tools" / "stand_in_image.sh"
PUBLISHED = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh
source $HOME/.local/bin/env
uvx --with pytest==8.4.1 --with pytest-json-ctrf==0.3.5 pytest --ctrf /logs/verifier/ctrf.json /tests/test_it.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture(scope="module")
def image(docker_daemon: DockerDaemon) -> str:
    """The stand-in, made once per recipe and kept in the user's cache."""
    digest = hashlib.sha256(RECIPE.read_bytes()).hexdigest()[:16]
    tar = platformdirs.user_cache_path("thundersync") / f"stand-in-{digest}.tar"
    if not tar.exists():
        made = subprocess.run(["bash", str(RECIPE), str(tar)], capture_output=True, text=True, timeout=900, check=False)
        if made.returncode != 0:
            pytest.skip(f"THE STAND-IN IMAGE CANNOT BE MADE: {made.stderr[-500:]}")
    path = "ENV PATH=/opt/stand-in:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8"
    docker_daemon.docker("import", "-c", path, str(tar), IMAGE)
    return IMAGE


@pytest.fixture(scope="module")
async def runtime(docker_daemon: DockerDaemon, image: str) -> AsyncIterator[DockerRuntime]:
    runtime = DockerRuntime(docker_daemon.host)
    yield runtime
    await runtime.close()


async def test_tasks_that_install_while_scoring_are_checked_on_the_stand_in(
    runtime: DockerRuntime, tmp_path: Path
) -> None:
    harbor = make_folder(tmp_path / "sets" / "harbor")
    (harbor / "tests" / "test.sh").write_text(PUBLISHED)
    (harbor / "tests" / "test_it.py").write_text(
        "from pathlib import Path\ndef test(): assert Path('hello.txt').exists()\n"
    )
    old = make(tmp_path / "sets" / "old")
    (old / "run-tests.sh").write_text("uv init\nuv add pytest\nuv run pytest $TEST_DIR/test_outputs.py -rA\n")
    (old / "tests" / "test_outputs.py").write_text("import os\ndef test_it(): assert os.path.exists('/app/done')\n")
    (old / "solution.sh").write_text("touch /app/done\n")
    stand_in = StandIn(IMAGE, tmp_path / "stand-in")
    checks = TaskCheck(runtime, jobs=1, network="off", stand_in=IMAGE, place=stand_in.place)
    for found in find_all(str(tmp_path / "sets"), keep=KeptFiles(tmp_path / "kept")):
        report = await checks.check(found)
        assert (report.state, report.empty, report.solved, report.stand_in) == ("ok", 0.0, 1.0, IMAGE), report


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published tasks are not here (THUNDERSYNC_TASKS)")
async def test_published_terminal_tasks_are_good_or_told_why_not(runtime: DockerRuntime, tmp_path: Path) -> None:
    checks = TaskCheck(runtime, jobs=2, network="off", stand_in=IMAGE, place=StandIn(IMAGE, tmp_path / "on").place)
    found = find_all(str(SHARED), keep=KeptFiles(tmp_path / "kept"))
    reports: list[TaskReport] = []
    await checks.run([each for each in found if not each.format.startswith("swe_")], done=reports.append)
    assert {each.reason != "" for each in reports if each.state != "ok"} == {True}
    states = {each.key.rpartition("/")[2]: each.state for each in reports}
    assert {name for name, state in states.items() if state == "refused"} == {
        "cookbook-mcp-tools", "cookbook-multi-container",
    }  # fmt: skip
    assert {name for name, state in states.items() if state == "needs_network"} == {
        "tb2-build-cython-ext", "tb2-configure-git-webserver",
        "swebench-pallets__flask-5014", "swebench-psf__requests-1142",
    }  # fmt: skip
    assert {name for name, state in states.items() if state == "needs_root"} == {
        name for name in states if name.startswith("polyglot-")
    }
    assert set(states.values()) == {"ok", "refused", "needs_network", "needs_root"}


async def test_a_checker_without_its_tools_is_no_zero(runtime: DockerRuntime, tmp_path: Path) -> None:
    harbor = make_folder(tmp_path / "set")
    (harbor / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN rm -r /opt/stand-in\nWORKDIR /app\n")
    (harbor / "tests" / "test.sh").write_text(PUBLISHED)
    (found,) = find_all(str(tmp_path / "set"))
    report = await TaskCheck(runtime, jobs=1).check(found)
    assert report.state == "needs_network"
    assert "Could not resolve host: astral.sh" in report.reason


async def test_a_repair_is_edited_by_an_ordinary_user_and_judged(runtime: DockerRuntime, tmp_path: Path) -> None:
    row = a_row(tmp_path)
    dockerfile = tmp_path / "context" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("FROM debian", f"FROM {IMAGE}"))
    found = smith_task(row, suite="s", keep=KeptFiles(tmp_path / "kept"), near=tmp_path)
    report = await TaskCheck(runtime, jobs=1).check(found)
    assert (report.state, report.empty, report.solved) == ("ok", 0.0, 1.0), report
