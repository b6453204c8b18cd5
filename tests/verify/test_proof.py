"""`verify` finds every way exact where it is, and is not blind where one is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.learn import replay as rp
from tests.learn import test_turns
from tests.tiny import tiny_model
from tests.verify.rig import config, link, prover, recorded, scored_turns
from thundersync.core.types import Failed, Scored
from thundersync.errors import NothingToVerify
from thundersync.learn import messages as m
from thundersync.learn.branch import Branch
from thundersync.learn.flat import GradientSink
from thundersync.learn.parts import CohortParts
from thundersync.learn.pool import PartPool
from thundersync.learn.prompts import SharedPrompts
from thundersync.verify.findings import Proof

TOLERANCE = 5e-6
OPD = {"algo__type": "opd", "teacher": {"name": "other"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), std=0.1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher"), std=0.1, seed=5)


def ways(proof: Proof) -> set[str]:
    return {finding.path for finding in proof.findings}


@pytest.mark.parametrize("changes", [
    {},
    {"algo__type": "dr_grpo"},
    {"algo__type": "rloo"},
    {"algo__type": "reinforce_pp"},
    {"algo__type": "dapo"},
    {"algo__norm_by_std": "batch"},
    {"algo__kl_coef": 0.1, "algo__entropy_coef": 0.01},
    {"algo__kl_coef": 0.1, "algo__kl_type": "k1"},
    {"algo__kl_coef": 0.1, "algo__zero_variance": "skip"},
    {"algo__mismatch": "seq_mask", "algo__mismatch_high": 50.0, "algo__mismatch_low": 0.01},
    {"model__lora": {"rank": 4}},
], ids=lambda changes: "-".join(f"{k.split('__')[-1]}={v}" for k, v in changes.items()) or "grpo")  # fmt: skip
async def test_every_way_of_every_objective_is_found_exact(
    model: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    cfg = config(model, **changes)
    step = rp.record(48, groups=2, size=4, rewards=(0.0, 1.0), failed=0.2, forked=0.2)  # as many as `verify` takes
    assert {type(r.outcome) for r in step.rollouts} == {Scored, Failed}
    assert max(len(r.sequences) for r in step.rollouts) == 2
    proof = await prover(cfg, [link(cfg, model, tmp_path)]).prove(recorded(step))
    assert proof.ok
    assert {finding.same_bits for finding in proof.findings} == {None, True}
    assert {"streamed", "packed", "a rollout a pass", "no room for parts", "room for one part"} <= ways(proof)
    assert {"spilled parts", "lazy"} <= ways(proof)
    in_the_loss = cfg.algo.kl_coef > 0 and cfg.algo.kl_type != "k1"  # refused together with a release at the content
    assert ("held for rewards" in ways(proof)) == (not in_the_loss)
    assert ("blocks of 32" in ways(proof)) == (cfg.algo.mismatch != "seq_mask")
    exact = [finding for finding in proof.findings if finding.relative_l2 < TOLERANCE]
    assert len(exact) == len(proof.findings), proof.findings


@pytest.mark.parametrize("who", [
    {"topk": 0},
    {"topk": 8, "kl": "forward"},
    {"topk": -1, "kl": "mixed", "mix": 0.3},
], ids=lambda who: f"topk={who['topk']}")  # fmt: skip
async def test_every_schedule_of_a_teacher_is_found_exact(
    model: Path, teacher: Path, tmp_path: Path, who: dict[str, Any]
) -> None:
    cfg = config(model, algo__type="opd", teacher={"name": str(teacher), **who})
    held = str(teacher) if who["topk"] == -1 else ""
    prompts, turns = test_turns.record(42)
    recording = await scored_turns(prompts, turns, test_turns.scorer(teacher, who["topk"]))
    proof = await prover(cfg, [link(cfg, model, tmp_path, teacher_path=held)]).prove(recording)
    assert proof.ok
    assert max(finding.relative_l2 for finding in proof.findings) < TOLERANCE
    assert {"forward", "immediate", "deferred", "packed", "lazy"} <= ways(proof)


async def test_a_block_without_a_sampled_token_is_exact_too(model: Path, teacher: Path, tmp_path: Path) -> None:
    """A long tool result fills whole blocks of a row that is cut."""
    cfg = config(model, algo__type="opd", teacher={"name": str(teacher), "topk": 8, "kl": "forward"})
    prompts, turns = test_turns.record(42)
    filler = list(range(50, 140))
    rollouts = {rollout.rollout_id: rollout for _, rollout in turns if rollout is not None}
    longer = [
        (
            msgspec.structs.replace(
                turn,
                token_ids=turn.token_ids[: turn.start] + filler + turn.token_ids[turn.start :],
                start=turn.start + len(filler),
                end=turn.end + len(filler),
            ),
            rollouts[turn.rollout_id],
        )
        for turn, _ in turns
        if turn.turn == 0
    ]
    recording = await scored_turns(prompts, longer, test_turns.scorer(teacher, 8))
    proof = await prover(cfg, [link(cfg, model, tmp_path)]).prove(recording)
    assert proof.ok
    assert "blocks of 32" in ways(proof)


async def test_a_retried_rollouts_first_attempt_is_replayed_too(model: Path, teacher: Path, tmp_path: Path) -> None:
    cfg = config(model, **OPD)  # type: ignore[arg-type]
    prompts, turns = test_turns.record(43)
    name = next(turn.rollout_id for turn, rollout in turns if rollout is None)
    first, rest = next(turn for turn, _ in turns if turn.rollout_id == name), turns
    again = [
        (msgspec.structs.replace(t, attempt=2), msgspec.structs.replace(r, attempt=2) if r is not None else None)
        if t.rollout_id == name
        else (t, r)
        for t, r in rest
    ]
    recording = await scored_turns(prompts, [(first, None), *again], test_turns.scorer(teacher, 0))
    assert sum(arrival.broken is not None for arrival in recording.arrivals) == 1
    assert (await prover(cfg, [link(cfg, model, tmp_path)]).prove(recording)).ok


async def test_a_model_that_cannot_be_cut_has_fewer_ways_and_they_are_exact(model: Path, tmp_path: Path) -> None:
    cfg = config(model)
    own = link(cfg, model, tmp_path)
    own.worker._gradient._prompts.shares = False
    proof = await prover(cfg, [own], shares_prompts=False).prove(recorded(rp.record(42)))
    assert proof.ok
    assert "blocks of 32" not in ways(proof)


async def test_each_way_is_what_its_name_says(model: Path, tmp_path: Path) -> None:
    cfg = config(model)
    own = link(cfg, model, tmp_path)
    proof = await prover(cfg, [own]).prove(recorded(rp.record(44, groups=3, size=4)))
    by_path = {finding.path: finding for finding in proof.findings}
    for path in ("streamed", "a rollout a pass", "spilled parts", "held for rewards", "folded parts", "blocks of 32"):
        assert by_path[path].parts > 0, path
    for path in ("packed", "no room for parts", "lazy"):
        assert by_path[path].parts == 0, path
    assert by_path["packed"].passes == 3
    assert by_path["a rollout a pass"].passes == 12
    assert sum(isinstance(request, m.RunHeld) for request in own.requests) == 12
    spilled = [r for r in own.requests if isinstance(r, m.Limits) and r.resident_parts == 0]
    assert len(spilled) == 1


async def test_flat_groups_are_given_rewards_and_the_table_says_so(model: Path, tmp_path: Path) -> None:
    cfg = config(model)
    flat = rp.record(42, rewards=(0.0,))
    proof = await prover(cfg, [link(cfg, model, tmp_path)]).prove(recorded(flat))
    assert proof.ok
    assert proof.references[0].norm > 0
    assert "the rewards of 3 of the groups were equal: replaced by 0, 1, 0.5, 0.25, ..." in proof.notes[0]
    assert "folded parts" not in ways(proof)  # the new rewards fold anyway


async def test_binary_rewards_leave_folding_to_a_way_of_its_own(model: Path, tmp_path: Path) -> None:
    cfg = config(model)
    step = rp.record(44, size=4)
    proof = await prover(cfg, [link(cfg, model, tmp_path)]).prove(recorded(step))
    assert proof.ok
    assert "folded parts" in ways(proof)


async def test_without_room_for_parts_only_the_ways_a_run_has_are_tried(model: Path, tmp_path: Path) -> None:
    cfg = config(model)
    proof = await prover(cfg, [link(cfg, model, tmp_path)], max_parts=0).prove(recorded(rp.record(42)))
    assert proof.ok
    assert not {"spilled parts", "folded parts", "held for rewards"} & ways(proof)


async def test_a_teacher_that_agrees_with_the_policy_proves_nothing(model: Path, tmp_path: Path) -> None:
    cfg = config(model, **OPD)  # type: ignore[arg-type]
    prompts, turns = test_turns.record(42)
    recording = await scored_turns(prompts, turns, test_turns.scorer(model, 0))
    with pytest.raises(NothingToVerify, match="teacher and policy agree"):
        await prover(cfg, [link(cfg, model, tmp_path)]).prove(recording)


async def test_rollouts_that_are_all_alike_prove_nothing(model: Path, tmp_path: Path) -> None:
    cfg = config(model)
    step = rp.record(42, groups=1)
    alike = [
        msgspec.structs.replace(r, sequences=step.rollouts[0].sequences, outcome=Scored(reward=i, stop="submitted"))
        for i, r in enumerate(step.rollouts)
    ]
    with pytest.raises(NothingToVerify, match="all alike"):
        await prover(cfg, [link(cfg, model, tmp_path)]).prove(recorded(msgspec.structs.replace(step, rollouts=alike)))


Breaking = Callable[[pytest.MonkeyPatch], None]


def wrong_base(patch: pytest.MonkeyPatch) -> None:
    """The reward part is centred on another reward than the one its join assumes."""
    whole = CohortParts.__init__
    patch.setattr(CohortParts, "__init__", lambda self, pool, base: whole(self, pool, base + 0.25))


def scaled_part(patch: pytest.MonkeyPatch) -> None:
    """A part comes back a hundredth of a percent too large."""
    whole = CohortParts._coefficients
    patch.setattr(CohortParts, "_coefficients", lambda self, s: [(p, c * 1.0001) for p, c in whole(self, s)])


def lost_prompt(patch: pytest.MonkeyPatch) -> None:
    """What passes owe their group's prompt is forgotten."""
    patch.setattr(SharedPrompts, "close", lambda self, group_id, into: self.groups.pop(group_id))


def unclean_host_memory(patch: pytest.MonkeyPatch) -> None:
    """A spilled part does not begin at zero."""
    whole = PartPool._new
    patch.setattr(PartPool, "_new", lambda self, *, spilled: whole(self, spilled=spilled).add_(1e-3 * spilled))


@pytest.mark.parametrize(("broken", "seen_in"), [
    (wrong_base, {"folded parts"}),
    (scaled_part, {"streamed", "spilled parts"}),
    (lost_prompt, {"streamed", "packed", "lazy"}),
    (unclean_host_memory, {"spilled parts"}),
])  # fmt: skip
async def test_a_broken_worker_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Breaking, seen_in: set[str]
) -> None:
    cfg = config(model)
    own = prover(cfg, [link(cfg, model, tmp_path)])
    broken(monkeypatch)
    proof = await own.prove(recorded(rp.record(44, size=4)))
    assert not proof.ok
    assert seen_in <= {finding.path for finding in proof.findings if not finding.ok}


async def test_a_sweep_that_is_left_out_is_found(
    model: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(model, **OPD)  # type: ignore[arg-type]
    prompts, turns = test_turns.record(42)
    recording = await scored_turns(prompts, turns, test_turns.scorer(teacher, 0))
    own = prover(cfg, [link(cfg, model, tmp_path)])
    monkeypatch.setattr(Branch, "sweep", lambda self, *args: None)
    proof = await own.prove(recording)
    wrong = {finding.path for finding in proof.findings if not finding.ok}
    assert {"forward", "immediate"} <= wrong
    assert "packed" not in wrong


async def test_other_bits_in_the_same_order_are_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(model)
    own = prover(cfg, [link(cfg, model, tmp_path)])
    whole, calls = GradientSink.into, iter(range(10_000))

    def trembling(self: GradientSink, targets: Any) -> Any:
        targets[0][0].mul_(1 + 2e-7 * (next(calls) % 3))
        return whole(self, targets)

    monkeypatch.setattr(GradientSink, "into", trembling)
    proof = await own.prove(recorded(rp.record(44)))
    repeated = next(finding for finding in proof.findings if finding.same_bits is not None)
    assert repeated.same_bits is False
    assert not repeated.ok
    assert repeated.relative_l2 <= repeated.tolerance


def test_torch_is_exact_to_its_own_rounding() -> None:
    """The smallest change that must be found is far above what float32 sums lose."""
    assert torch.finfo(torch.float32).eps * 10 < TOLERANCE
