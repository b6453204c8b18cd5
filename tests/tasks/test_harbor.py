"""Folders in, tasks out; every fault of every folder told at once, and nothing unusual lost on the way."""

from pathlib import Path

import pytest

from tests.tasks.folders import TOML, make_folder
from thundersync.errors import TaskError
from thundersync.tasks.harbor import load_tasks
from thundersync.tasks.harbor_files import strip_canary


def test_a_complete_folder_becomes_one_task(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (task,) = load_tasks(str(folder))
    assert (task.task_id, task.suite, task.instruction) == ("say-hello", tmp_path.name, "Create hello.txt.")
    assert (task.image.name, task.image.context) == ("", str(folder / "environment"))
    assert (task.checker.tests, task.checker.command) == (str(folder / "tests"), "bash /tests/test.sh")
    assert (task.checker.timeout_s, task.agent_timeout_s, task.build_timeout_s) == (30.0, None, 600.0)
    assert (task.workdir, task.memory_mib, task.network) == ("/app", 1024, False)
    assert task.solution == str(folder / "solution" / "solve.sh")


def test_a_folder_of_folders_is_loaded_sorted_and_what_is_no_task_is_passed_over(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        make_folder(tmp_path, name)
    (tmp_path / ".git").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "README.md").touch()
    assert [task.task_id for task in load_tasks(str(tmp_path))] == ["a", "b", "c"]


def test_all_faults_of_all_folders_are_told_at_once(tmp_path: Path) -> None:
    make_folder(tmp_path, "fine")
    (make_folder(tmp_path, "no-toml") / "task.toml").unlink()
    (make_folder(tmp_path, "no-test") / "tests" / "test.sh").unlink()
    bare = make_folder(tmp_path, "bare")
    (bare / "environment" / "Dockerfile").unlink()
    (bare / "instruction.md").write_text("\n")
    make_folder(tmp_path, "typed", toml='[agent]\ntimeout_sec = "soon"\n[environment]\nmemory = "lots"\n')
    make_folder(tmp_path, "torn", toml="[agent\n")
    with pytest.raises(TaskError) as caught:
        load_tasks(str(tmp_path))
    text = caught.value.message
    for expected in (
        "no-toml/task.toml is missing",
        "no-test/tests/test.sh is missing",
        "bare/instruction.md is empty",
        "bare/environment/Dockerfile is missing",
        "typed/task.toml [agent] Expected `float | null`, got `str` - at `agent.timeout_sec`",
        'typed/task.toml [environment] memory = "lots" is not a size',
        "torn/task.toml is not valid TOML",
    ):
        assert expected in text
    assert "fine/" not in text
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ('[[environment.mcp_servers]]\nname = "x"\n', "MCP servers"),
        ('[environment.healthcheck]\ncommand = "true"\n', "a health check of the whole environment"),
        ("[environment]\ngpus = 1\n", "gpus = 1"),
        ('[environment]\nos = "windows"\n', 'os = "windows"'),
        ('[environment]\nnetwork_mode = "allowlist"\n', "a network allowlist"),
        ('[verifier]\nenvironment_mode = "separate"\n', 'verifier.environment_mode = "separate"'),
        ('[agent]\nuser = "root"\n', 'agent.user = "root"'),
        ("[agent]\nuser = 0\n", 'agent.user = "0"'),
        (
            '[[steps]]\nname = "a"\nagent = { user = "root" }\n',
            "[[steps]] a asks for what cannot be run yet: agent.user",
        ),
        ('[verifier]\nuser = "judge"\n', 'verifier.user = "judge"'),
        ('[verifier]\nnetwork_mode = "public"\n[environment]\nnetwork_mode = "no-network"\n', "verifier alone"),
    ],
)
def test_what_cannot_be_run_yet_is_refused_by_name(tmp_path: Path, toml: str, told: str) -> None:
    make_folder(tmp_path, toml=toml)
    with pytest.raises(TaskError, match="cannot be run yet") as caught:
        load_tasks(str(tmp_path))
    assert told in caught.value.message


def test_compose_services_are_refused_without_misleading_faults(tmp_path: Path) -> None:
    (make_folder(tmp_path, "composed") / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(TaskError) as caught:
        load_tasks(str(tmp_path))
    assert "compose services" in caught.value.message
    assert "missing" not in caught.value.message


@pytest.mark.parametrize(
    ("environment", "network", "memory_mib"),
    [
        ("", True, 2048),
        ("allow_internet = false\n", False, 2048),
        ('network_mode = "no-network"\nallow_internet = true\n', False, 2048),
        ('network_mode = "public"\nmemory = "512M"\n', True, 512),
        ('memory = "2Gi"\n', True, 2048),
        ('memory = "1.5GB"\n', True, 1536),
        ("memory = 1073741824\n", True, 1024),
        ('memory_mb = 4096\nmemory = "1G"\n', True, 4096),
    ],
)
def test_both_ages_of_network_and_memory_keys_are_read(
    tmp_path: Path, environment: str, network: bool, memory_mib: int
) -> None:
    make_folder(tmp_path, toml=f"[environment]\n{environment}")
    (task,) = load_tasks(str(tmp_path))
    assert (task.network, task.memory_mib) == (network, memory_mib)


@pytest.mark.parametrize(
    ("environment", "disk_mib"),
    [("", 0), ("storage_mb = 10240\n", 10240), ('storage = "10G"\n', 10240), ('storage_mb = 1\nstorage = "1G"\n', 1)],
)
def test_both_ages_of_the_storage_key_are_read(tmp_path: Path, environment: str, disk_mib: int) -> None:
    make_folder(tmp_path, toml=f"[environment]\n{environment}")
    (task,) = load_tasks(str(tmp_path))
    assert task.disk_mib == disk_mib


def test_unknown_keys_and_both_version_keys_are_tolerated(tmp_path: Path) -> None:
    make_folder(tmp_path, "a", toml='schema_version = "1.4"\nartifacts = ["/x"]\n[agent]\nmood = "good"\n[novel]\n')
    make_folder(tmp_path, "b", toml='version = "1.0"\n')
    assert len(load_tasks(str(tmp_path))) == 2
    make_folder(tmp_path, "c", toml='schema_version = "2.0"\n')
    with pytest.raises(TaskError, match=r"c/task.toml has schema version '2.0'"):
        load_tasks(str(tmp_path))


def test_variables_fill_the_env_tables_and_a_missing_one_is_a_fault(tmp_path: Path) -> None:
    toml = '[environment.env]\nA = "${X}/a"\nB = "${Y:-plain}"\n[verifier.env]\nC = "${X}"\n'
    make_folder(tmp_path, toml=toml)
    (task,) = load_tasks(str(tmp_path), variables={"X": "seen"})
    assert (task.env, task.checker.env) == ({"A": "seen/a", "B": "plain"}, {"C": "seen"})
    with pytest.raises(TaskError, match=r"\[environment.env\] needs the variable X"):
        load_tasks(str(tmp_path))


def test_the_solutions_env_is_read_and_a_variable_that_only_it_needs_is_no_fault(tmp_path: Path) -> None:
    make_folder(tmp_path, toml='[solution.env]\nA = "${X:-a}"\nKEY = "${KEY}"\nB = "b"\n')
    (task,) = load_tasks(str(tmp_path))
    assert task.solution_env == {"A": "a", "KEY": "", "B": "b"}


def test_a_prebuilt_image_needs_no_dockerfile(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, toml='[environment]\ndocker_image = "debian:12"\nworkdir = "/srv"\n')
    (folder / "environment" / "Dockerfile").unlink()
    (task,) = load_tasks(str(tmp_path))
    assert (task.image.name, task.image.context, task.workdir) == ("debian:12", "", "/srv")


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        ("FROM a\n", "/"),
        ("FROM a\nWORKDIR /x\nworkdir y\n", "/x/y"),
        ("FROM a AS one\nWORKDIR /x\nFROM b\nRUN true\n", "/"),
        ("FROM\ta\nWORKDIR\t/x\n", "/x"),
        ('FROM a\nWORKDIR \\\n  "/app"\n', "/app"),
        ("FROM a AS One\nWORKDIR /x\nFROM b\nWORKDIR /y\nFROM one AS two\nFROM two\nWORKDIR z\n", "/x/z"),
        ("ARG TOP=/srv\nFROM a\nENV APP=$TOP/app B='1 2'\nWORKDIR ${APP}\nWORKDIR ../b\n", "/srv/b"),
        ("FROM a\nENV APP /my app\nENV broken='\nWORKDIR $APP\n", "/my app"),
    ],
)
def test_the_workdir_is_the_one_of_the_last_stage(tmp_path: Path, dockerfile: str, workdir: str) -> None:
    (make_folder(tmp_path) / "environment" / "Dockerfile").write_text(dockerfile)
    assert load_tasks(str(tmp_path))[0].workdir == workdir


def test_a_workdir_that_only_the_base_image_knows_has_to_be_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "environment" / "Dockerfile").write_text("FROM golang\nWORKDIR $GOPATH/src\n")
    with pytest.raises(TaskError, match=r"the WORKDIR /\$GOPATH/src, .*: name it in task.toml, environment.workdir"):
        load_tasks(str(tmp_path))
    (folder / "task.toml").write_text('[environment]\nworkdir = "/go/src"\n')
    assert load_tasks(str(tmp_path))[0].workdir == "/go/src"


@pytest.mark.parametrize(
    ("first_line", "command"),
    [
        ("#!/bin/sh -e", "bash /tests/test.sh"),
        ("#!/usr/bin/env bash", "bash /tests/test.sh"),
        ("mkdir -p /logs", "bash /tests/test.sh"),
        ("#!/usr/bin/env python3", "/usr/bin/env python3 /tests/test.sh"),
    ],
)
def test_a_checker_runs_under_the_interpreter_its_first_line_names(
    tmp_path: Path, first_line: str, command: str
) -> None:
    (make_folder(tmp_path) / "tests" / "test.sh").write_text(first_line + "\n")
    assert load_tasks(str(tmp_path))[0].checker.command == command


def test_canary_lines_at_the_top_are_left_out_and_other_comments_stay() -> None:
    assert strip_canary("<!-- harbor-canary GUID 26b5 -->\n\n# Title\ntext\n") == "# Title\ntext"
    marked = "# Some Canary String, DO NOT REMOVE:\n# NEVER IN CORPORA. some-canary GUID 26b5\nDo it.\n"
    assert strip_canary(marked) == "Do it."
    assert strip_canary("# The canary deployment\nRoll it out.") == "# The canary deployment\nRoll it out."


def test_a_filter_file_chooses_the_tasks_and_its_wrong_ids_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path, "good")
    make_folder(tmp_path, "bad", toml="[[steps]]\n")
    chosen = tmp_path / "task_filter.txt"
    chosen.write_text("good\n\n")
    assert [task.task_id for task in load_tasks(str(tmp_path))] == ["good"]
    chosen.write_text("good\nlost\n")
    with pytest.raises(TaskError, match="lost"):
        load_tasks(str(tmp_path))


def test_nothing_to_load_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "nowhere"), "starter/nowhere"):
        with pytest.raises(TaskError) as caught:
            load_tasks(path)
        assert caught.value.remedy


def test_a_long_list_of_faults_is_cut_and_counted(tmp_path: Path) -> None:
    for index in range(50):
        (make_folder(tmp_path, f"task-{index}", toml=TOML) / "instruction.md").unlink()
    with pytest.raises(TaskError, match="and 10 more"):
        load_tasks(str(tmp_path))
