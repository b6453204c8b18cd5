"""The command: from a run's folder or a configuration to sentences, a table, a JSON file and a picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec import structs
from rich.console import Console

from tests.forecast.test_recorded import told_step
from tests.forecast.told import run_of
from thundersync.config import Config
from thundersync.config_file import config_from, to_toml
from thundersync.forecast import StepTrace, bound, simulate
from thundersync.monitor.events import to_line
from thundersync.plan.command import placement_of, plan
from thundersync.plan.model import find_model
from thundersync.plan.outlook import look
from thundersync.plan.runs import NothingToPlan, earlier_run, read_run
from thundersync.plan.words import sentences

DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def configured(tmp_path: Path, **sections: object) -> Config:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(DECODER))
    return config_from(
        {
            "name": "told",
            "output_dir": str(tmp_path / "runs"),
            "model": {"name": str(model), "max_model_len": 1024, "dtype": "float32"},
            "env": {"type": "harbor", "path": "starter/train"},
            "algo": {"group_size": 2, "prompts_per_step": 2},
            **sections,
        }
    )


def steps(workers: int = 1, engines: int = 1) -> list[StepTrace]:
    return [
        told_step(
            [4, 20 + i, 9, 31], [0.0, 1.0, 1.0, 0.0], [500, 900, 700, 800], engines=engines, workers=workers,
            generated_s=30.0,
        )
        for i in range(4)
    ]  # fmt: skip


def recorded(tmp_path: Path, traces: list[StepTrace], *, on_gpus: bool = False, dtype: str = "") -> Path:
    """`dtype`: what the run told where its configuration left it open."""
    config = configured(tmp_path)
    if dtype:
        config = structs.replace(config, model=structs.replace(config.model, dtype="auto"))
    folder = tmp_path / "runs" / "told"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    started, *others = run_of(traces, on_gpus=on_gpus)
    lines = b"".join(map(to_line, [structs.replace(started, dtype=dtype), *others]))
    (folder / "events.jsonl").write_bytes(lines + b'{"kind":"torn')
    return folder


def spoken(capsys: pytest.CaptureFixture[str], target: Path, **files: Path | None) -> str:
    wanted = {"json": None, "picture": None, **files}
    assert plan(target, variables={}, console=Console(width=160), **wanted) == 0
    return capsys.readouterr().out


def test_a_runs_own_steps_are_told_with_bound_and_speedup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path, steps())
    shown = spoken(capsys, folder)
    measured = sum(simulate(step, "stream").step_s for step in steps()[1:]) / 3
    assert "3 steps of told, without 1 of warm-up, run as `stream` on 1 engine core + 1 trainer worker." in shown
    assert f"A step took {measured:.1f} s, 0.0% behind its forecast" in shown
    assert "Streaming takes" in shown and "bound" in shown


def test_json_and_picture_say_the_same_and_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path, steps())
    written, drawn = tmp_path / "plan.json", tmp_path / "plan.svg"
    spoken(capsys, folder, json=written, picture=drawn)
    found = json.loads(written.read_text())
    assert found["outlook"]["error"] < 1e-6
    assert found["outlook"]["bound_s"] <= found["outlook"]["arms"]["stream"]["step_s"]
    assert sum(found["outlook"]["path"].values()) == pytest.approx(found["outlook"]["forecast_s"])
    assert found["memory"]["kv_token"] == 2 * 2 * 2 * 16 * 4
    picture = ElementTree.parse(drawn).getroot()
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"lazy", "stream", "4 begin", "learns"} <= set(texts)
    assert f"no order is faster: {bound(steps()[1]):.1f} s" in "".join(map(str, texts)) or len(texts) > 12


def heavy() -> list[StepTrace]:
    """Learning takes far longer than generating: engines idle, so a device goes over to the trainers."""
    return [
        told_step(
            [1, 2, 1, 3], [0.0, 1.0, 1.0, 0.0], [5000, 9000, 7000, 8000], engines=5, workers=3, generated_s=3.0,
            max_tokens=1,
        )
        for _ in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        (" 1 MiB", "It does not fit: 0.0"),
        (" 81559 MiB", "a GPU of the run has 80 GiB."),
        ("", "what a GPU of the run has is not written down"),
    ],
)
def test_the_recommended_split_is_told_with_its_memory_and_whether_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, told: str
) -> None:
    folder = recorded(tmp_path, heavy(), on_gpus=True)
    (folder / "environment.json").write_text(json.dumps({"GPUs": f"8 x A Model,{gpu}, driver 1", "memory": "24 GiB"}))
    shown = spoken(capsys, folder, json=tmp_path / "plan.json")
    assert "Memory at 4 engine GPUs + 4 trainer GPUs: 0.0" in shown and told in shown
    found = json.loads((tmp_path / "plan.json").read_text())
    now, then = (
        sum(item["size"] for item in found[key]["trainer"] if item["name"] == "Adam moments")
        for key in ("memory", "split_memory")
    )
    assert 4 * then == pytest.approx(3 * now, abs=8)  # four owners of it instead of three


def test_a_run_is_told_by_the_devices_that_it_had_and_not_by_this_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = spoken(capsys, recorded(tmp_path, heavy(), on_gpus=True))
    assert "memory of each GPU" in shown and "memory of each process" not in shown
    assert "Placement: 5 GPUs generated, 3 GPUs learned, in float32, as the run told." in shown


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_run_is_told_in_the_dtype_that_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, width: int
) -> None:
    folder = recorded(tmp_path, steps(), dtype=dtype)
    assert f"learned, in {dtype}, as the run told" in spoken(capsys, folder, json=tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    (weights,) = (item["size"] for item in found["memory"]["trainer"] if item["name"] == "weights")
    assert weights == width * found["model"]["whole"]
    run, model = read_run(folder), find_model(configured(tmp_path))
    assert model is not None
    allowed = model.parts_allowed(run.config, dtype="float32" if width == 4 else "bfloat16", workers=1, on_gpus=False)
    assert run.steps[0].room == allowed.room


def test_another_split_is_named_with_what_it_gains(tmp_path: Path) -> None:
    told = sentences(look(read_run(recorded(tmp_path, heavy(), on_gpus=True))))
    assert any(line.startswith("4 engine GPUs + 4 trainer GPUs: ") and "instead of" in line for line in told)
    assert any("Learning is the longest part" in line for line in told)


def test_a_configuration_finds_the_earlier_run_of_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.toml"
    config = configured(tmp_path)
    file.write_text(to_toml(config))
    assert "not known before a run of this name" in spoken(capsys, file)
    recorded(tmp_path, steps())
    shown = spoken(capsys, file)
    assert "3 steps of told" in shown and "memory of each process" in shown
    found = earlier_run(config)
    assert found is not None and found.folder.name == "told"
    with pytest.raises(NothingToPlan, match="cannot be written"):
        plan(file, json=tmp_path / "no" / "x.json", picture=None, variables={}, console=Console(quiet=True))


def test_gpus_that_are_elsewhere_can_be_planned_for(tmp_path: Path) -> None:
    config = configured(tmp_path, engine={"gpus": [0, 1, 2]}, trainer={"gpus": [3, 4]})
    placement = placement_of(config, {})
    assert placement.on_gpus
    assert [place.gpu for place in placement.trainers] == [3, 4]


def test_what_holds_no_steps_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NothingToPlan, match="neither a configuration file nor a run's folder"):
        plan(tmp_path / "nowhere", json=None, picture=None, variables={}, console=Console(quiet=True))
    with pytest.raises(NothingToPlan, match="no run that can be read"):
        read_run(tmp_path)
    folder = recorded(tmp_path, steps()[:1])
    opened = (folder / "events.jsonl").read_bytes().split(b"\n")
    (folder / "events.jsonl").write_bytes(b"\n".join(opened[:4]))
    with pytest.raises(NothingToPlan, match="it committed none") as caught:
        read_run(folder)
    assert "commit a step" in caught.value.remedy
    file = tmp_path / "config.toml"
    file.write_text(to_toml(configured(tmp_path)))
    with pytest.raises(NothingToPlan, match="no steps to draw"):
        plan(file, json=None, picture=tmp_path / "x.svg", variables={}, console=Console(quiet=True))
