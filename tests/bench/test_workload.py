"""Workloads: drawn by a seed, recorded from rollouts, kept in a file; each with exact counts."""

import statistics
from pathlib import Path

import msgspec
import pytest

from thundersync.bench.workload import (
    GroupWork,
    RolloutWork,
    StepWork,
    TurnWork,
    Workload,
    drawn,
    read,
    recorded,
    write,
)
from thundersync.bench.workload import workload_of as of_config
from thundersync.config import BenchConfig, Config, EnvConfig, ModelConfig
from thundersync.core.types import Failed, Outcome, Rollout, Scored, TokenSequence, Turn
from thundersync.errors import ConfigError
from thundersync.rundir import RunFolder

SCORED = Scored(reward=1.0, stop="submitted")


def test_a_drawn_workload_is_a_function_of_its_seed() -> None:
    bench = BenchConfig(steps=2)
    assert drawn(bench, groups=2, size=3, seed=1) == drawn(bench, groups=2, size=3, seed=1)
    assert drawn(bench, groups=2, size=3, seed=1) != drawn(bench, groups=2, size=3, seed=2)


def test_a_drawn_workload_has_the_configured_means_and_spreads() -> None:
    bench = BenchConfig(turns_min=2, turns_max=2, reply_tokens=200, reply_spread=0.5, tool_s=3.0, tool_spread=1.0)
    (step,) = drawn(bench, groups=60, size=50, seed=0).steps
    turns = [turn for rollout in step.rollouts for turn in rollout.turns]
    replies = [turn.sampled_tokens for turn in turns]
    waits = [turn.tool_s for turn in turns]
    assert statistics.fmean(replies) == pytest.approx(200, rel=0.05)
    assert statistics.stdev(replies) == pytest.approx(100, rel=0.1)
    assert statistics.fmean(waits) == pytest.approx(3.0, rel=0.1)
    assert statistics.fmean([rollout.reward or 0.0 for rollout in step.rollouts]) == pytest.approx(0.5, abs=0.05)


def test_every_seed_has_the_same_lengths_waits_and_rewards_met_by_other_rollouts() -> None:
    (one,), (other,) = (drawn(BenchConfig(), groups=3, size=4, seed=seed).steps for seed in (1, 2))
    for what in (sampled, waited, rewarded):
        assert sorted(what(one)) == sorted(what(other))
        assert what(one) != what(other)


def sampled(step: StepWork) -> list[float]:
    return [turn.sampled_tokens for rollout in step.rollouts for turn in rollout.turns]


def waited(step: StepWork) -> list[float]:
    return [turn.tool_s for rollout in step.rollouts for turn in rollout.turns]


def rewarded(step: StepWork) -> list[float]:
    return [rollout.reward or 0.0 for rollout in step.rollouts]


def rollout(name: str, prompt: int, turns: list[Turn], outcome: Outcome = SCORED) -> Rollout:
    ends = {turn.sequence: turn.end for turn in turns}
    sequences = [
        TokenSequence(
            token_ids=[7] * prompt + [100 + index] * (ends[index] - prompt),
            sampled=[any(t.start <= i < t.end for t in turns if t.sequence == index) for i in range(ends[index])],
            logprobs=[0.0] * ends[index],
            prompt_tokens=min(t.start for t in turns if t.sequence == index),
        )
        for index in sorted(ends)
    ]
    return Rollout(
        rollout_id=name,
        group_id=name.rpartition("-")[0],
        task_id="t",
        policy_version=0,
        messages=[],
        sequences=sequences,
        turns=turns,
        outcome=outcome,
        started_s=0.0,
        score_s=0.25,
    )


def turn(index: int, start: int, end: int, *, sequence: int = 0, tool_s: float = 0.0) -> Turn:
    return Turn(
        index=index, sequence=sequence, start=start, end=end, finish_reason="stop", policy_version=0, tool_s=tool_s
    )


async def test_a_recorded_workload_has_every_count_wait_and_reward_of_the_run(tmp_path: Path) -> None:
    plain = rollout("g-00", 10, [turn(0, 10, 15, tool_s=1.5), turn(1, 18, 20)])
    rewritten = rollout("g-01", 10, [turn(0, 10, 12), turn(1, 30, 34, sequence=1)])
    broken = rollout("g-02", 10, [turn(0, 10, 11)], Failed(reason="sandbox", detail="gone"))
    async with RunFolder.create(tmp_path, "run", "", False) as folder:
        await folder.write_rollouts(0, [plain, rewritten, broken])
    found = recorded(tmp_path / "run", steps=1)
    (group,) = found.steps[0].groups
    assert group.prompt_tokens == 10
    assert group.rollouts[0] == RolloutWork(
        turns=[
            TurnWork(given_tokens=0, sampled_tokens=5, tool_s=1.5),
            TurnWork(given_tokens=3, sampled_tokens=2),
        ],
        reward=1.0,
        score_s=0.25,
    )
    assert group.rollouts[1].turns[1] == TurnWork(given_tokens=30, sampled_tokens=4, fresh=True)
    assert group.rollouts[2].reward is None
    write(found, tmp_path / "work.json")
    assert read(tmp_path / "work.json") == found


async def test_a_group_that_never_came_to_a_reply_is_replayed_with_another_groups_prompt(tmp_path: Path) -> None:
    gone = [rollout(f"h-{index:02d}", 10, [], Failed(reason="sandbox", detail="gone")) for index in range(2)]
    members = [rollout(f"g-{index:02d}", 10, [turn(0, 10, 12 + index)]) for index in range(2)]
    async with RunFolder.create(tmp_path, "run", "", False) as folder:
        await folder.write_rollouts(0, [*gone, *members])
    bench = BenchConfig(workload=str(tmp_path / "run"))
    found = of_config(Config(model=ModelConfig(name="m"), env=EnvConfig(path="p"), bench=bench))
    assert [group.prompt_tokens for group in found.steps[0].groups] == [10, 10]


@pytest.mark.parametrize(
    ("bench", "told"),
    [
        (BenchConfig(reply_tokens=500, reply_spread=0.0), "model.max_model_len is 300"),
        (BenchConfig(workload="nowhere"), "cannot be read"),
    ],
)
def test_a_workload_that_cannot_be_replayed_is_refused_before_anything_starts(bench: BenchConfig, told: str) -> None:
    config = Config(model=ModelConfig(name="m", max_model_len=300), env=EnvConfig(path="p"), bench=bench)
    with pytest.raises(ConfigError, match=told):
        of_config(config)


def test_a_prompt_without_a_token_of_its_own_is_refused(tmp_path: Path) -> None:
    group = GroupWork(prompt_tokens=5, rollouts=[RolloutWork(turns=[], reward=1.0)])
    write(Workload(source="a test", shared_tokens=5, steps=[StepWork(groups=[group])]), tmp_path / "work.json")
    config = Config(
        model=ModelConfig(name="m"), env=EnvConfig(path="p"), bench=BenchConfig(workload=str(tmp_path / "work.json"))
    )
    with pytest.raises(ConfigError, match="no token beyond the 5"):
        of_config(config)


def test_a_folder_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no rollouts"):
        recorded(tmp_path, steps=1)


def test_a_workload_file_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    write(drawn(BenchConfig(), groups=1, size=2, seed=0), tmp_path / "work.json")
    assert msgspec.json.decode((tmp_path / "work.json").read_bytes())["steps"][0]["groups"][0]["prompt_tokens"] == 96
