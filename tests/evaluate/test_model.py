"""Evaluations with a model: its own files or a merged adapter in the engines, and no trainer anywhere."""

from pathlib import Path

import psutil
import pytest

from tests.endtoend.rig import config, drawing_tasks
from tests.tiny import tiny_model
from thundersync.evaluation import Evaluation
from thundersync.generate.base import Sampling
from thundersync.learn.lora import add_adapter, published_parameters, save_adapter
from thundersync.learn.policy import load_frozen
from thundersync.learn.settings import LoraSettings

PROMPT = list(range(1, 40))


def adapter_of(model: Path, folder: Path) -> Path:
    """An adapter that changes a lot."""
    import torch

    policy = load_frozen(str(model), dtype="float32", device="cpu")
    add_adapter(policy, LoraSettings(rank=4, alpha=64.0, target_modules=("all-linear",)), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    folder.mkdir()
    save_adapter(policy, folder)
    for file in model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def scores(model: Path, adapter: Path | None) -> list[float]:
    """Logprobs of the prompt's second half by transformers, the adapter merged."""
    import torch

    from thundersync.learn.lora import load_adapter

    policy = load_frozen(str(model), dtype="float32", device="cpu")
    if adapter is not None:
        load_adapter(policy, adapter)
        merged = dict(published_parameters(policy))
        policy = load_frozen(str(model), dtype="float32", device="cpu")
        policy.load_state_dict(merged, strict=False)
    with torch.no_grad():
        logits = policy(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return [float(logits[i, PROMPT[i + 1]]) for i in range(19, len(PROMPT) - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "adapter"])
async def test_the_engines_have_the_evaluated_weights_and_no_trainer_runs(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path / "model")
    adapter = adapter_of(model, tmp_path / "adapter") if kind == "adapter" else None
    suite = drawing_tasks(tmp_path / "held-out", 3)
    wanted = config(tmp_path, adapter or model, eval={"env": {"path": str(suite)}, "group_size": 2})
    async with Evaluation(wanted) as evaluation:
        children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        assert not any("learn.worker" in each for each in children)
        (engine,) = evaluation.generators
        told = await engine.score(PROMPT, start=20, request_id="x")
        assert told.logprobs == pytest.approx(scores(model, adapter), abs=5e-4)
        report = await evaluation.run()
        reply = await engine.generate(PROMPT, Sampling(max_tokens=2), request_id="y")
        assert reply.policy_version == 0
    (figures,) = report.suites
    assert (figures.tasks, figures.scored, figures.failed) == (3, 6, 0)
    assert set(figures.pass_at) == {"1", "2"}
    left = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not any("thundersync" in each for each in left)
    assert not list(Path("/dev/shm").glob(f"thundersync-{psutil.Process().pid}-*"))
