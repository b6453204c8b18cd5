"""Whole runs from the command line: what they leave behind, what signals do, and how they continue."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.docker_daemon import BASE_IMAGE, DockerDaemon
from tests.endtoend.rig import Run, count, drawing_tasks, raw_config
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[object]:
    runs: list[Run] = []

    def begin(*arguments: str, **changes: object) -> Run:
        file = tmp_path / "config.toml"
        if not file.exists():
            file.write_text(tomli_w.dumps(raw_config(tmp_path, model, **changes)))
        runs.append(Run(tmp_path, file, *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """Where the runs are: a disk of 64 MiB; None where none can be made."""
    runs = tmp_path / "runs"
    runs.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(runs)], check=False).returncode:
        warnings.warn("A FULL DISK IS NOT TRIED: mounting a small one needs root", stacklevel=1)
        yield None
        return
    yield runs
    subprocess.run(["umount", str(runs)], check=True)


def fill(disk: Path) -> Path:
    """To the last byte. Gives the file to remove."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return filler


def rows(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.events.parent / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.vllm
def test_a_run_commits_publishes_and_leaves_its_folder_and_nothing_else(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = start(engine__backend="vllm")
    run.until(lambda events: count(events, "step_opened") > 0)
    folder = run.events.parent
    watched = subprocess.run(  # from another process, while it runs
        [sys.executable, "-m", "thundersync", "monitor", str(folder), "--json"],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    told = [json.loads(line)["kind"] for line in watched.stdout.splitlines()]
    assert told[0] == "run_started" and told[-1] == "run_finished" and told.count("step_committed") == 3
    assert run.wait() == 0, run.text()
    assert run.left_behind() == []
    metrics = rows(run)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    needed = {
        "reward_mean", "reward_std", "step_s", "engine_busy", "trainer_busy", "queue_wait_s", "tokens", "staleness",
        "mismatch_mean", "mismatch_max", "grad_norm",
    }  # fmt: skip
    assert needed <= set(metrics[0])
    for row in metrics:
        assert row["staleness"] == 0
        assert row["mismatch_max"] < 1e-3  # float32 on both sides
    assert metrics[-1]["policy_version"] == 3 - sum(row["empty"] for row in metrics)
    listed = subprocess.run(
        f"zstdcat {folder}/rollouts/step-000001.jsonl.zst | jq -r .outcome.type | sort | uniq -c",
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert listed.stdout.split() == ["6", "scored"]
    kinds = {str(event["kind"]) for event in run.read_events()}
    assert {"run_started", "step_opened", "turn_generated", "rollout_scored", "group_closed", "step_committed",
            "weights_published", "checkpoint_saved", "gauges", "run_finished"} <= kinds  # fmt: skip
    assert "step 3/3 committed" in run.text()
    assert "<h1>run</h1>" in (folder / "report.html").read_text()
    assert (folder / "environment.json").is_file()
    seen = subprocess.run(
        [sys.executable, "-m", "thundersync", "monitor", str(folder), "--plain"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "step 3/3 committed" in seen.stdout


@pytest.mark.parametrize(
    ("moment", "backend"),
    [
        ("starting", "transformers"),
        pytest.param("starting", "vllm", marks=[pytest.mark.slow, pytest.mark.vllm]),
        pytest.param("generating", "vllm", marks=pytest.mark.vllm),
    ],
)
def test_an_interrupt_leaves_nothing(start, moment: str, backend: str) -> None:  # type: ignore[no-untyped-def]
    run = start(max_steps=200, engine__backend=backend)
    seen = {"turn_started": 15, "step_committed": 1} if moment == "generating" else {}
    run.until(lambda events: all(count(events, k) >= n for k, n in seen.items()) and "starting" in run.text())
    run.signal(
        signal.SIGHUP if (moment, backend) == ("starting", "transformers") else signal.SIGINT
    )  # its terminal closes
    assert run.wait(limit_s=60) == 130, run.text()
    assert run.left_behind() == []
    if seen:  # what was committed is saved
        saved = sorted((run.events.parent / "checkpoints").glob("step-*"))
        assert int(saved[-1].name[5:]) == len(rows(run)) > 0


@pytest.mark.parametrize(
    ("backend", "process"),
    [
        ("transformers", "transformers_worker"),
        pytest.param("vllm", "EngineCore", marks=[pytest.mark.slow, pytest.mark.vllm]),
    ],
)
def test_a_killed_engine_is_restarted_a_full_disk_ends_the_run_and_a_killed_trainer_its_second(  # type: ignore[no-untyped-def]
    start, small_disk: Path | None, backend: str, process: str
) -> None:
    run = start(max_steps=200, engine__backend=backend)
    run.until(lambda events: count(events, "step_committed") > 0)
    run.child(process).kill()
    run.until(lambda events: any("restarted" in str(event.get("text")) for event in events))
    committed = count(run.read_events(), "step_committed")
    run.until(lambda events: count(events, "step_committed") > committed + 1)
    if small_disk is not None:
        filler = fill(small_disk)
        assert run.wait() == 1, run.text()
        assert "No space left" in run.text() and "Free space" in run.text()
        assert "Traceback" not in run.text()
        assert not list(small_disk.rglob(".step-*"))
        filler.unlink()
    else:
        run.signal(signal.SIGINT)
        assert run.wait(limit_s=60) == 130, run.text()
    assert run.left_behind() == []
    saved = int(sorted((run.events.parent / "checkpoints").glob("step-*"))[-1].name[5:])
    assert saved > committed
    again = start("--resume", "--set", "stream.mode=lazy")
    again.until(resumed_and_learned)
    assert len(rows(again)) > saved
    assert [row["step"] for row in rows(again)] == list(range(len(rows(again))))
    again.child("thundersync.learn.worker").kill()
    assert again.wait(limit_s=30) == 1
    assert "trainer worker 0" in again.text()  # with its log and a remedy
    assert "--resume" in again.text()
    assert again.left_behind() == []
    learned_after_the_last_reward(again)


def resumed_and_learned(events: list[dict[str, Any]]) -> bool:
    """Whether the second start has committed a step that had something to learn: not every step of chance has."""
    if count(events, "run_started") < 2:
        return False
    kinds = [event["kind"] for event in since_start(events)]
    return "pass_started" in kinds and "step_committed" in kinds[kinds.index("pass_started") :]


def since_start(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the run's last start has told."""
    return events[max(index for index, event in enumerate(events) if event["kind"] == "run_started") :]


def learned_after_the_last_reward(run: Run) -> None:
    landed, passes = 0, 0
    for event in since_start(run.read_events()):
        if event["kind"] == "step_opened":
            landed = 0
        landed += event["kind"] == "rollout_scored"
        if event["kind"] == "pass_started":
            passes += 1
            assert landed == 6
    assert passes


def test_a_killed_run_leaves_nothing_is_evaluated_and_resumes_from_its_last_commit(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    unseen = {"path": str(drawing_tasks(tmp_path / "eval-tasks", 2))}
    run = start(max_steps=4, eval__env=unseen, eval__group_size=2)
    run.until(lambda events: count(events, "checkpoint_saved") >= 2)
    run.signal(signal.SIGKILL)
    run.wait()
    # Its children end and clean up for it; only the feed's socket file stays, in the run's own folder.
    assert run.left_behind(but="feed.sock") == []
    before = rows(run)
    evaluation(run, tmp_path)
    resumed = start("--resume")  # the evaluation's folder is not taken for the run
    assert resumed.wait() == 0, resumed.text()
    after = rows(resumed)
    assert [row["step"] for row in after] == [0, 1, 2, 3]
    assert after[:2] == before[:2]
    assert {"sandbox_start_p50_s", "sandbox_start_p95_s", "sandboxes_from_stock"} <= set(after[-1])
    opened: dict[int, list[str]] = {}
    for event in resumed.read_events():
        if event["kind"] == "step_opened":
            opened.setdefault(int(str(event["step"])), event["task_ids"])  # type: ignore[arg-type]
            assert opened[int(str(event["step"]))] == event["task_ids"]  # the same tasks each time
    checkpoint = sorted((resumed.events.parent / "checkpoints").glob("step-*"))[-1]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template


def evaluation(run: Run, folder: Path) -> None:
    """`eval` of a checkpoint measures it, in a folder of its own."""
    checkpoint = run.events.parent / "checkpoints" / "step-000002"
    command = [sys.executable, "-m", "thundersync", "eval", str(folder / "config.toml"), "--plain"]
    done = subprocess.run(
        [*command, "--model", str(checkpoint)],
        capture_output=True, text=True, timeout=180, env={**os.environ, "TMPDIR": str(run.temporary)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "draw-0" in done.stdout
    assert "draw-1" in done.stdout
    (evaluated,) = (folder / "runs").glob("eval-*")
    assert len((evaluated / "samples.jsonl").read_text().splitlines()) == 4
    assert (evaluated / "results.json").is_file()
    assert not list((evaluated / "checkpoints").glob("*"))


def test_a_second_run_of_the_same_name_is_refused_with_a_remedy(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "config.toml").write_text("")
    run = start()
    assert run.wait() == 1
    assert "--resume" in run.text()
    assert "Traceback" not in run.text()


@pytest.mark.docker
def test_a_run_works_in_docker_containers_and_leaves_none(start, docker_daemon: DockerDaemon, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tasks = drawing_tasks(tmp_path / "container-tasks", 3, image=BASE_IMAGE)
    run = start(
        "--set", "max_steps=2", sandbox__runtime="docker", sandbox__docker_host=docker_daemon.host, env__path=str(tasks)
    )
    assert run.wait() == 0, run.text()
    assert "docker sandboxes" in run.text()
    assert count(run.read_events(), "rollout_scored") == 12
    assert docker_daemon.docker("ps", "-aq").strip() == ""
    assert run.left_behind() == []


def test_a_prompt_that_leaves_no_room_is_told_before_an_engine_starts(start) -> None:  # type: ignore[no-untyped-def]
    run = start(model__max_model_len=64, rollout__max_tokens=8)
    assert run.wait(limit_s=60) == 1
    assert "model.max_model_len is 64" in run.text()
    assert "->" in run.text()
    again = start("--dry-run")  # and the name is free again
    assert again.wait() == 0
    assert not (run.events.parent / "config.toml").exists()


def test_a_dead_docker_daemon_is_told_before_anything_starts(start) -> None:  # type: ignore[no-untyped-def]
    run = start(sandbox__runtime="docker", sandbox__docker_host="unix:///nowhere/docker.sock")
    assert run.wait(limit_s=30) == 1
    assert "/nowhere/docker.sock" in run.text()
    assert "->" in run.text()
    assert not (run.folder / "runs").exists()


def test_eval_without_tasks_is_told_at_once(start, tmp_path: Path, model: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "config.toml").write_text(tomli_w.dumps(raw_config(tmp_path, model)))
    done = subprocess.run(
        [sys.executable, "-m", "thundersync", "eval", str(tmp_path / "config.toml")],
        capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "there are no evaluation tasks" in done.stdout
    assert not (tmp_path / "runs").exists()
