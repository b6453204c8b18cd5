"""Terminal-Bench 1 folders as they are published; what cannot be run is named."""

from pathlib import Path

import pytest

from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.terminal_bench import find_terminal_bench, read_terminal_bench

YAML = """# canary GUID 0
instruction: |-
  Write it.
author_name: unknown
mood: good
parser_name: pytest
max_agent_timeout_sec: 90.0
max_test_timeout_sec: 30
"""
COMPOSE = """services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - LANG=C.UTF-8
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
    deploy: {resources: {limits: {cpus: '2', memory: 1G}}}
"""


def make(parent: Path, name: str = "one", **changed: str) -> Path:
    folder = parent / name
    texts = {
        "task.yaml": YAML,
        "docker-compose.yaml": COMPOSE,
        "Dockerfile": "FROM debian\nWORKDIR /app\n",
        "run-tests.sh": "pytest $TEST_DIR\n",
        "tests/test_outputs.py": "",
        "solution.sh": "true\n",
    } | {key.replace("__", "."): text for key, text in changed.items()}
    for relative, text in texts.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if text:
            path.write_text(text)
    return folder


def test_a_folder_becomes_one_task(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (found,) = find_terminal_bench(folder, keep=KeptFiles(tmp_path / "kept"))
    task = found.task
    assert task is not None, found.faults
    assert (task.task_id, task.suite, task.instruction) == ("one", tmp_path.name, "Write it.")
    assert (task.image.name, task.image.context, task.workdir) == ("", str(folder), "/app")
    checker = task.checker
    assert (checker.verdict, checker.command, checker.timeout_s) == ("test_summary", "bash /tests/run-tests.sh", 30.0)
    assert (checker.tests, checker.script) == (str(folder / "tests"), str(folder / "run-tests.sh"))
    assert task.env == {"TEST_DIR": "/tests", "LANG": "C.UTF-8"}
    assert (task.cpus, task.memory_mib, task.agent_timeout_s) == (2.0, 1024, 90.0)
    assert task.solution == str(folder / "solution.sh")


def test_a_typed_solution_becomes_a_script(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "solution.sh").unlink()
    (folder / "solution.yaml").write_text(
        "- command: cat > a\n- command: x\n  append_enter: false\n- command: y\n  block: true\n"
    )
    task, _ = read_terminal_bench(folder, keep=KeptFiles(tmp_path / "kept"))
    assert task is not None
    assert Path(task.solution).read_text() == "#!/bin/bash\ncat > a\nxy\n"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("task.yaml", "instruction: 5\n", "task.yaml cannot be read"),
        ("task.yaml", YAML.replace("pytest", "mlebench"), "parser_name 'mlebench'"),
        ("task.yaml", YAML + "run_tests_in_same_shell: true\n", "agent's own shell"),
        ("Dockerfile", "FROM debian\nCOPY . /app\n", "the agent would see them"),
        ("Dockerfile", 'FROM debian\nCOPY ["./", "/app"]\n', "the agent would see them"),
        ("Dockerfile", "FROM debian\nCOPY \\\n  --chown=1:1 * /app/\n", "the agent would see them"),
        ("docker-compose.yaml", COMPOSE + "  db: {image: postgres}\n", "2 services (client, db)"),
        ("docker-compose.yaml", COMPOSE.replace("command:", "privileged: true\n    command:"), "privileged"),
        ("docker-compose.yaml", COMPOSE.replace("1G", "lots"), "no size: 'lots'"),
        ("docker-compose.yaml", COMPOSE.replace("dockerfile: Dockerfile", "context: ../x"), "another folder"),
        ("docker-compose.yaml", COMPOSE.replace("${T_BENCH_TASK_LOGS_PATH}:", "/var/run:"), "mounts /var/run"),
        ("docker-compose.yaml", "services: [", "cannot be read"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, name: str, text: str, told: str) -> None:
    folder = make(tmp_path)
    (folder / name).write_text(text)
    task, faults = read_terminal_bench(folder, keep=KeptFiles(tmp_path / "kept"))
    assert task is None
    assert told in "; ".join(faults)


@pytest.mark.parametrize(
    ("command", "idle"),
    [
        ("sleep infinity", True),
        ('["sleep", "infinity"]', True),
        ('["/bin/bash", "-c", "tail -f /dev/null"]', True),
        ("tail -F /dev/null", True),
        ("sh -c 'while true; do sleep 3600; done'", True),
        ("/bin/bash", True),
        ('["bash", "-l"]', True),
        ("", True),
        ("./serve.sh", False),
        ('["bash", "-c", "service nginx start && sleep infinity"]', False),
        ("bash /app/start.sh", False),
        ("'unclosed", False),
    ],
)
def test_a_service_that_does_more_than_to_wait_is_refused(tmp_path: Path, command: str, idle: bool) -> None:
    folder = make(tmp_path)
    given = COMPOSE.replace('[ "sh", "-c", "sleep infinity" ]', command)
    assert command in given
    (folder / "docker-compose.yaml").write_text(given)
    task, faults = read_terminal_bench(folder, keep=KeptFiles(tmp_path / "kept"))
    assert (task is not None) == idle, faults
    if command.startswith("["):
        assert idle or "cannot be run yet: the command `service nginx start && sleep infinity`" in faults[0]


def test_a_missing_script_and_dockerfile_are_both_told(tmp_path: Path) -> None:
    folder = make(tmp_path)
    for name in ("Dockerfile", "run-tests.sh"):
        (folder / name).unlink()
    _, faults = read_terminal_bench(folder, keep=KeptFiles(tmp_path / "kept"))
    assert [fault.split()[0] for fault in faults] == ["run-tests.sh", "Dockerfile"]


def test_a_dockerfile_that_copies_all_is_fine_where_an_ignore_file_says_what(tmp_path: Path) -> None:
    folder = make(tmp_path, Dockerfile="FROM debian\nCOPY . /app\n")
    (folder / ".dockerignore").write_text("tests\nsolution.sh\nrun-tests.sh\n")
    task, faults = read_terminal_bench(folder, keep=KeptFiles(tmp_path / "kept"))
    assert task is not None, faults
