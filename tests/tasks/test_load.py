"""One door for all formats: the right reader is found, filters choose, shaping is set."""

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.folders import make_folder
from tests.tasks.repairs import a_row
from tests.tasks.test_terminal_bench import make
from thundersync.config import EnvConfig
from thundersync.core.types import Task
from thundersync.errors import TaskError
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.load import detect, find_all, load_env


@pytest.fixture
def keep(tmp_path: Path) -> KeptFiles:
    return KeptFiles(tmp_path / ".kept")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    return str(path)


PROMPT = {"id": "p", "prompt": "Say yes.", "checker": "echo 1 > /logs/verifier/reward.txt"}


def smith_rows(tmp_path: Path) -> list[dict[str, Any]]:
    kinds = ("func_pm_op_change__aaaaaaaa", "func_pm_remove_loop__bbbbbbbb", "lm_rewrite__cccccccc", "pr_12")
    rows = [a_row(tmp_path, instance_id=f"pypi__calc.00000000.{kind}") for kind in kinds]
    rows[1]["problem_statement"] = ""
    rows[2]["PASS_TO_PASS"] = []
    return rows


def test_the_format_is_found_by_what_lies_there(tmp_path: Path) -> None:
    make_folder(tmp_path / "harbor")
    make(tmp_path / "tb")
    assert detect("starter/train") == "harbor"
    assert detect(str(tmp_path / "harbor")) == detect(str(tmp_path / "harbor" / "say-hello")) == "harbor"
    assert detect(str(tmp_path / "tb")) == detect(str(tmp_path / "tb" / "one")) == "terminal_bench"
    assert detect(write_rows(tmp_path / "a.jsonl", [PROMPT])) == "prompts"
    assert detect(write_rows(tmp_path / "b.json", smith_rows(tmp_path))) == "swe_smith"
    assert detect("package.module:function") == "python"
    with pytest.raises(TaskError, match="no format that is known"):
        detect(write_rows(tmp_path / "c.json", [{"a": 1}]))


def test_prompt_rows_become_tasks_with_their_checker_as_a_folder(tmp_path: Path, keep: KeptFiles) -> None:
    row = {**PROMPT, "files": {"data.txt": "7"}, "solution": "true", "dockerfile": "FROM debian\n"}
    (task,) = load_env(EnvConfig(path=write_rows(tmp_path / "rows.jsonl", [row])), keep=keep)
    assert (task.task_id, task.suite, task.instruction) == ("p", "rows", "Say yes.")
    assert {path.name for path in Path(task.checker.tests).iterdir()} == {"test.sh", "data.txt"}
    assert Path(task.solution).read_text() == "true"
    assert (Path(task.image.context) / "Dockerfile").read_text() == "FROM debian\n"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"prompt": " "}, "prompt is empty"),
        ({"checker": 5}, "Expected `str`"),
        ({"imgae": "x"}, "imgae"),
        ({"image": "x", "dockerfile": "FROM y"}, "both given"),
        ({"files": {"../x": ""}}, "not a plain name"),
        ({"workdir": "x"}, "not absolute"),
    ],
)
def test_a_wrong_prompt_row_is_told(tmp_path: Path, keep: KeptFiles, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_env(EnvConfig(path=write_rows(tmp_path / "rows.json", [{**PROMPT, **changed}])), keep=keep)
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, 4),
        ({"kinds": ("func_pm_*",)}, 2),
        ({"kinds": ("pr", "lm")}, 2),
        ({"kinds": ("pr_12",)}, 1),
        ({"issue_text": True}, 3),
        ({"max_tests": 2}, 1),
    ],
)
def test_filters_choose_repairs(tmp_path: Path, keep: KeptFiles, settings: dict[str, Any], kinds: int) -> None:
    path = write_rows(tmp_path / "rows.json", smith_rows(tmp_path))
    assert len(load_env(EnvConfig(path=path, **settings), keep=keep)) == kinds


def test_an_ids_file_chooses_hides_faults_of_others_and_must_name_what_is_there(
    tmp_path: Path, keep: KeptFiles
) -> None:
    rows = [PROMPT, {**PROMPT, "id": "torn", "prompt": ""}]
    ids = tmp_path / "ids.txt"
    ids.write_text("# chosen\np\n")
    env = EnvConfig(path=write_rows(tmp_path / "rows.jsonl", rows), ids=str(ids))
    assert [task.task_id for task in load_env(env, keep=keep)] == ["p"]
    ids.write_text("p\nlost\n")
    with pytest.raises(TaskError, match="lost"):
        load_env(env, keep=keep)
    env = EnvConfig(path=write_rows(tmp_path / "smith.json", smith_rows(tmp_path)), kinds=("combine_*",))
    with pytest.raises(TaskError, match="pass the filters"):
        load_env(env, keep=keep)


def test_a_check_report_leaves_out_what_is_not_ok_and_tells_it(tmp_path: Path, keep: KeptFiles) -> None:
    names = ("good", "torn", "bad", "needy", "new")
    rows = [{**PROMPT, "id": name, "prompt": "" if name == "torn" else "Say yes."} for name in names]
    report = tmp_path / "report.jsonl"
    env = EnvConfig(path=write_rows(tmp_path / "rows.jsonl", rows), checked=str(report))

    def checked(**states: str) -> None:
        lines = [{"key": f"rows/{name}", "format": "prompts", "state": state} for name, state in states.items()]
        report.write_text("".join(json.dumps(line) + "\n" for line in lines))

    checked(good="ok", torn="refused", bad="unsolved", needy="needs_root")
    said: list[str] = []
    assert [task.task_id for task in load_env(env, keep=keep, say=said.append)] == ["good"]
    (line,) = said
    assert all(each in line for each in ("1 refused", "1 unsolved", "1 needs_root", "1 not in it"))
    checked(good="unsolved", elsewhere="ok")
    with pytest.raises(TaskError, match="1 unsolved") as caught:
        load_env(env, keep=keep)
    assert f"tasks check {env.path} --json {report}" in caught.value.remedy
    report.unlink()
    with pytest.raises(TaskError, match=r"env\.checked: .* cannot be read"):
        load_env(env, keep=keep)
    report.write_text("good\n")
    with pytest.raises(TaskError, match="line 1 is no line of a report"):
        load_env(env, keep=keep)


def test_a_report_on_files_serves_their_folder_and_on_a_folder_a_file(tmp_path: Path, keep: KeptFiles) -> None:
    sets = tmp_path / "sets"
    sets.mkdir()
    one = write_rows(sets / "one.jsonl", [{**PROMPT, "id": "a"}, {**PROMPT, "id": "b"}])
    write_rows(sets / "two.jsonl", [{**PROMPT, "id": "c/d"}, {**PROMPT, "id": "e"}])
    report = tmp_path / "report.jsonl"
    states = {"one/a": "ok", "one/b": "unsolved", "two/c/d": "ok", "other/e": "ok", "else/e": "broken"}
    lines = [{"key": key, "format": "prompts", "state": state} for key, state in states.items()]
    report.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def used(path: str | Path) -> list[str]:
        return [task.task_id for task in load_env(EnvConfig(path=str(path), checked=str(report)), keep=keep)]

    assert sorted(used(sets)) == ["a", "c/d"]
    assert used(one) == ["a"]


def test_what_was_checked_on_a_stand_in_is_used_and_told(tmp_path: Path, keep: KeptFiles) -> None:
    report = tmp_path / "report.jsonl"
    report.write_text(json.dumps({"key": "rows/p", "format": "prompts", "state": "ok", "stand_in": "here:1"}) + "\n")
    env = EnvConfig(path=write_rows(tmp_path / "rows.jsonl", [PROMPT]), checked=str(report))
    said: list[str] = []
    assert len(load_env(env, keep=keep, say=said.append)) == 1
    assert "found on here:1, not on the tasks' own images" in said[0]


def test_shaping_and_weights_reach_the_checker(tmp_path: Path, keep: KeptFiles) -> None:
    folder = make_folder(tmp_path / "seta")
    (folder / "weights.json").write_text('{"test_a": 0.75, "test_b": 0.25}')
    (task,) = load_env(EnvConfig(path=str(tmp_path / "seta"), reward="pass_ratio"), keep=keep)
    assert (task.checker.shaping, task.checker.weights) == ("pass_ratio", {"test_a": 0.75, "test_b": 0.25})
    for wrong in ("[1]", '{"a": -1}', '{"a": 0}', "{}"):
        (folder / "weights.json").write_text(wrong)
        with pytest.raises(TaskError, match=r"weights.json"):
            load_env(EnvConfig(path=str(tmp_path / "seta")), keep=keep)
    path = write_rows(tmp_path / "smith.json", smith_rows(tmp_path))
    with pytest.raises(TaskError, match="is not judged so"):
        load_env(EnvConfig(path=path, reward="binary"), keep=keep)


def test_a_function_gives_tasks_or_rows(keep: KeptFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given_tasks.py").write_text(
        "from thundersync.tasks.harbor import load_tasks\n"
        "def both():\n    yield from load_tasks('starter/eval')[:1]\n"
        f"    yield {PROMPT!r}\n"
        "def wrong():\n    return [5]\ndef torn():\n    raise RuntimeError('no luck')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    first, second = load_env(EnvConfig(path="given_tasks:both"), keep=keep)
    assert isinstance(first, Task) and second.task_id == "p"
    for name, told in (("wrong", "gave int at place 0"), ("torn", "no luck"), ("lost", "lost")):
        with pytest.raises(TaskError, match=told):
            load_env(EnvConfig(path=f"given_tasks:{name}"), keep=keep)


def test_several_sets_below_one_folder_are_all_found_with_names_of_their_own(tmp_path: Path, keep: KeptFiles) -> None:
    root = tmp_path / "sets"
    make_folder(root / "harbor")
    make(root / "old" / "tb")
    (root / "rows").mkdir()
    write_rows(root / "rows" / "a.jsonl", [PROMPT])
    write_rows(root / "rows" / "b.jsonl", [PROMPT, {**PROMPT, "id": "q", "prompt": ""}])
    write_rows(root / "rows" / "sources.json", [{"a": 1}])
    (root / "rows" / "torn.json").write_text("{")
    found = {each.key: each.task is not None for each in find_all(str(root), keep=keep)}
    assert found == {
        "harbor/say-hello": True,
        "old/tb/one": True,
        "rows/a/p": True,
        "rows/b/p": True,
        "rows/b/q": False,
    }
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="no tasks in"):
        find_all(str(tmp_path / "empty"), keep=keep)


def test_what_cannot_be_read_is_an_error_with_a_remedy(tmp_path: Path, keep: KeptFiles) -> None:
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a", "checker": "b"}\n{"prompt"\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    for path, told in (("torn.jsonl", "line 2"), ("list.jsonl", "this is list"), ("nowhere", "no folder of tasks")):
        with pytest.raises(TaskError, match=told) as caught:
            load_env(EnvConfig(path=str(tmp_path / path)), keep=keep)
        assert caught.value.remedy


def test_packages_that_are_missing_are_named(tmp_path: Path, keep: KeptFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        if name in ("datasets", "pyarrow.parquet"):
            raise ImportError(name)
        return real(name)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", without)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    for path, told in ((str(tmp_path / "rows.parquet"), "needs pyarrow"), ("owner/name", "needs `datasets`")):
        with pytest.raises(TaskError, match=told):
            load_env(EnvConfig(path=path), keep=keep)


def test_rows_come_from_the_hub_through_datasets(
    tmp_path: Path, keep: KeptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    class Hub:
        @staticmethod
        def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
            asked.append((name, split))
            if split == "lost":
                raise ValueError("no such split")
            return [PROMPT]

    monkeypatch.setitem(sys.modules, "datasets", Hub())
    env = EnvConfig(type="prompts", path="owner/name", split="test")
    assert [task.task_id for task in load_env(env, keep=keep)] == ["p"]
    assert asked == [("owner/name", "test")]
    with pytest.raises(TaskError, match="no such split"):
        load_env(EnvConfig(type="prompts", path="owner/name", split="lost"), keep=keep)
    assert len(asked) == 2


def test_a_split_is_passed_on_and_the_only_one_of_another_name_is_taken_and_told(
    keep: KeptFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {"owner/verified": ["test"], "owner/two": ["dev", "test"]}

    class Hub:
        @staticmethod
        def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
            if split not in splits[name]:
                raise ValueError(f"Unknown split {split!r}. Should be one of {splits[name]}.")
            return [{**PROMPT, "id": split}]

        @staticmethod
        def get_dataset_split_names(name: str) -> list[str]:
            return splits[name]

    monkeypatch.setitem(sys.modules, "datasets", Hub())
    said: list[str] = []
    for split in ("train", "test"):
        tasks = load_env(EnvConfig(path="owner/verified", split=split), keep=keep, say=said.append)
        assert [task.task_id for task in tasks] == ["test"]
    assert said == ["the data set owner/verified has no split 'train'; its only one, 'test', is taken"]
    assert [each.task_id for each in find_all("owner/two", split="dev", keep=keep)] == ["dev"]
    with pytest.raises(TaskError, match="Unknown split 'train'") as caught:
        find_all("owner/two", keep=keep)
    assert "the splits dev, test" in caught.value.remedy
    with pytest.raises(TaskError, match="Unknown split 'lost'"):
        load_env(EnvConfig(path="owner/verified", split="lost"), keep=keep)


SHARED = Path(os.environ.get("THUNDERSYNC_TASKS", Path(__file__).parents[3] / "shared" / "tasks"))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published tasks are not here (THUNDERSYNC_TASKS)")
def test_published_tasks_of_all_formats_load_unchanged(keep: KeptFiles) -> None:
    found = find_all(str(SHARED), keep=keep)
    usable = Counter(each.format for each in found if each.task is not None)
    assert usable == {"harbor": 10, "terminal_bench": 16, "swe_smith": 31, "swe_bench": 24}
    assert {each.task_id: each.faults[0].rpartition(": ")[2] for each in found if each.task is None} == {
        "cookbook-mcp-tools": "MCP servers",
        "cookbook-multi-container": "compose services beside the agent's own",
    }
