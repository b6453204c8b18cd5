"""What a checker installs once while its image is built serves every scoring after, and nothing else is kept of it."""

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandboxes import BuildFailed, Command, DockerRuntime, SandboxSpec
from tests.docker_daemon import BASE_IMAGE, DockerDaemon
from tests.fakes import a_task
from tests.tasks.folders import make_folder
from thundersync.config import EnvConfig
from thundersync.config_file import config_from
from thundersync.core.types import Checker, Image, Task
from thundersync.errors import ConfigError, TaskError
from thundersync.tasks.baked import baked
from thundersync.tasks.check import TaskCheck
from thundersync.tasks.found import Found
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.load import find_all, load_env
from thundersync.tasks.standin import StandIn

# The internet, as these containers have none: whoever is not a sandbox (a build is not) can install.
HOME = "/root"
"""Of root in a container."""
INSTALLS = r"""#!/bin/bash
echo seen > /var/litter; cp /tests/expected /workspace/answer
if [ "$HOSTNAME" = sandbox ]; then
  echo 'curl: (6) Could not resolve host: astral.sh'
else
  mkdir -p ~/.local/bin ~/.cache/uv
  cat > ~/.cache/uv/tool <<'END'
shift 2
"$@" && said=PASSED || said=FAILED
printf '=== short test summary info ===\n%s t.py::test_it\n' $said
[ $said = PASSED ]
END
  printf '#!/bin/bash\n. ~/.cache/uv/tool\n' > ~/.local/bin/uvx
  chmod 755 ~/.local/bin/uvx
  echo "export PATH=$HOME/.local/bin:\$PATH" > ~/.local/bin/env
fi
source $HOME/.local/bin/env
uvx --with pytest==8.4.1 cmp hello.txt /tests/expected
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
async def runtime(docker_daemon: DockerDaemon) -> AsyncIterator[DockerRuntime]:
    runtime = DockerRuntime(docker_daemon.host)
    yield runtime
    await runtime.close()


@pytest.fixture
def keep(tmp_path: Path) -> KeptFiles:
    return KeptFiles(tmp_path / "kept")


def published(root: Path, script: str = INSTALLS) -> Found:
    folder = make_folder(root)
    (folder / "tests" / "test.sh").write_text(script)
    (folder / "tests" / "expected").write_text("hello\n")
    (folder / "solution" / "solve.sh").write_text("echo hello > hello.txt\n")
    (folder / "environment" / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nWORKDIR /workspace\n")
    (folder / "environment" / ".dockerignore").write_text("**\n")
    (found,) = find_all(str(root))
    return found


@pytest.mark.docker
async def test_scoring_needs_no_network_once_the_tools_are_baked_in(
    runtime: DockerRuntime, keep: KeptFiles, tmp_path: Path
) -> None:
    found = published(tmp_path / "set")
    assert (await TaskCheck(runtime, jobs=1, network="off").check(found)).state == "needs_network"
    report = await TaskCheck(runtime, jobs=1, network="off", bake=True, keep=keep).check(found)
    assert (report.state, report.empty, report.solved, report.baked) == ("ok", 0.0, 1.0, True), report


@pytest.mark.docker
async def test_an_agent_finds_no_trace_of_the_tests(runtime: DockerRuntime, keep: KeptFiles, tmp_path: Path) -> None:
    found = published(tmp_path / "set")
    assert found.task is not None
    task = baked(found.task, keep)
    sandbox = await runtime.start(SandboxSpec(context=task.image.context, workdir="/workspace"))
    everything = "find / -xdev -not -path '/proc/*' \\( -name '*thundersync-*' -o -name expected -o -name answer \\)"
    look = f"{everything}; ls -A /tests /logs/verifier /workspace /var/litter; ls -A ~/.local ~/.cache/uv"
    result = await sandbox.run(Command(script=look, user="root"))
    told = ["/tests:", "/workspace:", f"{HOME}/.cache/uv:", "tool", f"{HOME}/.local:", "bin"]
    assert result.stdout.decode().split() == told
    assert (await sandbox.read(f"{HOME}/.config/uv/uv.toml")) == b"offline = true\n"
    assert (await sandbox.run(Command(script=f"touch {HOME}/.local/bin/uvx || exit 3"))).exit_code == 3


@pytest.mark.docker
async def test_a_build_that_could_not_install_fails_and_says_so(
    runtime: DockerRuntime, keep: KeptFiles, tmp_path: Path
) -> None:
    found = published(tmp_path / "set", "curl https://astral.sh/uv/install.sh | sh\nuvx pytest /tests\n")
    assert found.task is not None
    with pytest.raises(BuildFailed, match="could not install its tools"):
        await runtime.prepare(SandboxSpec(context=baked(found.task, keep).image.context))


@pytest.mark.parametrize(
    ("dockerfile", "begins", "stage"),
    [
        ("FROM a\nRUN x\n", "FROM a AS thundersync-task\nRUN x\n", "thundersync-task"),
        ("FROM a AS one\nFROM one as Two\nRUN x", "FROM a AS one\nFROM one as Two\nRUN x\n", "Two"),
        ("FROM --platform=linux/amd64 a\n", "FROM --platform=linux/amd64 a AS thundersync-task\n", "thundersync-task"),
        ("FROM a AS one\nFROM \\\n  b\n", "FROM a AS one\nFROM b AS thundersync-task\n", "thundersync-task"),
        ("FROM a\nRUN x \\\n  FROM y\n", "FROM a AS thundersync-task\nRUN x \\\n  FROM y\n", "thundersync-task"),
    ],
)
def test_a_dockerfile_goes_on_from_its_last_stage(
    keep: KeptFiles, tmp_path: Path, dockerfile: str, begins: str, stage: str
) -> None:
    found = published(tmp_path / "set")
    assert found.task is not None
    source = Path(found.task.image.context) / "Dockerfile"
    source.write_text(dockerfile)
    folder = Path(baked(found.task, keep).image.context)
    made = (folder / "Dockerfile").read_text()
    assert made.startswith(begins)
    assert made.count(f"\nFROM {stage}") == 2
    assert source.read_text() == dockerfile
    assert Path(baked(found.task, keep).image.context) == folder
    source.write_text("RUN x\n")
    with pytest.raises(TaskError, match="no line FROM"):
        baked(found.task, keep)


def test_the_tasks_own_files_are_read_whatever_their_bytes_and_never_written(keep: KeptFiles, tmp_path: Path) -> None:
    found = published(tmp_path / "set")
    assert found.task is not None
    environment, shared = Path(found.task.image.context), tmp_path / "shared"
    for name, text in (("Dockerfile", b"FROM a\n# caf\xe9\n"), (".dockerignore", b"caf\xe9\n")):
        (tmp_path / f"shared{name}").write_bytes(text)
        (environment / name).unlink()
        (environment / name).symlink_to(tmp_path / f"shared{name}")
    made = Path(baked(found.task, keep).image.context)
    assert (made / "Dockerfile").read_bytes().startswith(b"FROM a AS thundersync-task\n# caf\xe9\n")
    assert (made / ".dockerignore").read_bytes() == b"caf\xe9\n!thundersync-bake\n"
    StandIn("here:1", tmp_path / "stand-in").place(found.task)
    assert Path(f"{shared}Dockerfile").read_bytes() == b"FROM a\n# caf\xe9\n"
    assert Path(f"{shared}.dockerignore").read_bytes() == b"caf\xe9\n"


def test_a_build_has_the_time_that_its_checker_may_take(keep: KeptFiles, tmp_path: Path) -> None:
    task = published(tmp_path / "set").task
    assert task is not None
    assert baked(task, keep).build_timeout_s == task.build_timeout_s + task.checker.timeout_s


def test_a_prebuilt_image_is_built_upon_and_a_checker_without_uv_left_alone(keep: KeptFiles, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text("uvx pytest\n")
    task = a_task(image=Image(name="far/away:1"), checker=Checker(tests=str(tests)))
    made = Path(baked(task, keep).image.context) / "Dockerfile"
    assert made.read_text().startswith("FROM far/away:1 AS thundersync-task\n")
    (tests / "test.sh").write_text("python3 -m pytest\n")
    assert baked(task, keep) is task


def test_a_task_whose_image_would_hold_the_tests_is_left_alone(keep: KeptFiles, tmp_path: Path) -> None:
    task = published(tmp_path / "set").task
    assert task is not None
    dockerfile = Path(task.image.context) / "Dockerfile"
    dockerfile.write_text("FROM a\nCOPY . /app\n")
    assert baked(task, keep) is task
    dockerfile.write_text("FROM a\nCOPY data/ /app/\n")
    assert baked(task, keep) is not task


def test_files_that_cannot_be_copied_are_the_tasks_fault_and_a_full_disk_is_not(
    keep: KeptFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = published(tmp_path / "set").task
    assert task is not None
    context = Path(task.image.context)
    os.mkfifo(context / "pipe")
    with pytest.raises(TaskError, match=r"the files of say-hello cannot be copied: .*pipe"):
        baked(task, keep)
    (context / "pipe").unlink()

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", full)
    stand_in = StandIn("here:1", tmp_path / "stand-in")
    places: list[Callable[[Task], Task]] = [lambda task: baked(task, keep), stand_in.place]
    for place in places:
        with pytest.raises(OSError, match="No space left") as caught:
            place(task)
        assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_run_asks_for_it_in_its_configuration(keep: KeptFiles, tmp_path: Path) -> None:
    published(tmp_path / "set")
    (task,) = load_env(EnvConfig(path=str(tmp_path / "set"), bake_tools=True), keep=keep)
    assert "thundersync-tools" in (Path(task.image.context) / "Dockerfile").read_text()
    raw = {"model": {"name": "m"}, "env": {"path": "p", "bake_tools": True}, "sandbox": {"runtime": "process"}}
    with pytest.raises(ConfigError, match=r"env\.bake_tools builds images"):
        config_from(raw)
