"""A workload: for every step, group and rollout its turns in exact token counts, its waits in seconds, and its reward.

Drawn from a configuration by a seed, or read from the rollouts of a run. Values only; what the tokens are is `replay`'s
business, how long generating and learning take is what the bench measures.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from thundersync.config import BenchConfig, Config
from thundersync.core.types import Rollout, Scored
from thundersync.errors import ConfigError
from thundersync.rundir import read_rollouts


class TurnWork(Struct, frozen=True, kw_only=True):
    """One generation, and the tool call after it."""

    given_tokens: int
    """What comes before it and after the last sampled token: a tool's result. Of a first turn 0: the prompt is the
    group's."""
    sampled_tokens: int
    tool_s: float = 0.0
    """The wait after it."""
    fresh: bool = False
    """The conversation was rewritten: it goes on in a token sequence of its own that begins with `given_tokens`."""


class RolloutWork(Struct, frozen=True, kw_only=True):
    turns: list[TurnWork]
    reward: float | None
    """None: its world failed, so that it never votes."""
    score_s: float = 0.0
    """Its checker's."""

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def own_tokens(self) -> int:
        """Beyond its group's prompt."""
        return sum(turn.given_tokens + turn.sampled_tokens for turn in self.turns)

    @property
    def waits_s(self) -> float:
        """Seconds in which it neither generates nor learns."""
        return self.score_s + sum(turn.tool_s for turn in self.turns)


class GroupWork(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    rollouts: list[RolloutWork]


class StepWork(Struct, frozen=True, kw_only=True):
    groups: list[GroupWork]

    @property
    def rollouts(self) -> list[RolloutWork]:
        return [rollout for group in self.groups for rollout in group.rollouts]


class Workload(Struct, frozen=True, kw_only=True):
    """Steps to be replayed; all have as many groups of as many rollouts."""

    source: str
    """For people: where it comes from."""
    shared_tokens: int
    """All prompts begin with the same so many tokens."""
    steps: list[StepWork]

    @property
    def prompts_per_step(self) -> int:
        return len(self.steps[0].groups)

    @property
    def group_size(self) -> int:
        return len(self.steps[0].groups[0].rollouts)

    def of_replay(self, number: int) -> StepWork:
        """The step that the `number`-th replay works."""
        return self.steps[number % len(self.steps)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        groups = [group for step in self.steps for group in step.groups]
        return max(_longest(group, rollout) for group in groups for rollout in group.rollouts)

    def sentence(self) -> str:
        """For people: one step's work."""
        step = self.steps[0]
        waits = sorted(rollout.waits_s for rollout in step.rollouts)
        turns = sum(len(rollout.turns) for rollout in step.rollouts)
        return (
            f"{self.prompts_per_step} groups x {self.group_size} rollouts, {turns} turns, "
            f"{sum(rollout.sampled_tokens for rollout in step.rollouts)} sampled tokens, prompts of "
            f"{min(g.prompt_tokens for g in step.groups)} to {max(g.prompt_tokens for g in step.groups)} tokens "
            f"({self.shared_tokens} shared by all), waits of {waits[0]:.1f} to {waits[-1]:.1f} s a rollout"
        )


def workload_of(config: Config) -> Workload:
    """What `config`'s bench replays. Raises: ConfigError when it cannot be read, or does not fit the model."""
    bench = config.bench or BenchConfig()
    if not bench.workload:
        found = drawn(bench, groups=config.algo.prompts_per_step, size=config.algo.group_size, seed=config.seed)
    else:
        path = Path(bench.workload)
        found = recorded(path, steps=bench.steps) if path.is_dir() else read(path)
    if any(group.prompt_tokens <= found.shared_tokens for step in found.steps for group in step.groups):
        raise ConfigError(
            f"a prompt of the workload has no token beyond the {found.shared_tokens} that all share",
            remedy="Lower its shared_tokens: the last token of a prompt is always its own.",
        )
    if found.longest > config.model.max_model_len:
        raise ConfigError(
            f"a rollout of the workload has {found.longest} tokens, and model.max_model_len is "
            f"{config.model.max_model_len}",
            remedy="Raise model.max_model_len, or shorten the workload's prompts, replies or turns.",
        )
    return found


def drawn(bench: BenchConfig, *, groups: int, size: int, seed: int) -> Workload:
    """Draw steps as `[bench]` says. The same seed gives the same workload on every machine.

    Lengths and waits are lognormal with the given mean and coefficient of variation. A step's draws are spread evenly
    over their distribution and only their order is left to chance: every seed has the same lengths and waits, met by
    other rollouts, so that seeds are repeats of one balance.
    """
    chance = random.Random(seed)
    return Workload(
        source=f"drawn from [bench] with seed {seed}",
        shared_tokens=bench.shared_tokens,
        steps=[_drawn_step(bench, groups, size, chance) for _ in range(bench.steps)],
    )


def _drawn_step(bench: BenchConfig, groups: int, size: int, chance: random.Random) -> StepWork:
    choices = bench.turns_max - bench.turns_min + 1
    counts = [bench.turns_min + int(place * choices) for place in _places(groups * size, chance)]
    replies = iter(_places(sum(counts), chance))
    waits = iter(_places(sum(counts), chance))
    rewards = iter(_places(groups * size, chance))

    def rollout(count: int) -> RolloutWork:
        turns = [
            TurnWork(
                given_tokens=bench.result_tokens if index else 0,
                sampled_tokens=max(1, round(lognormal(next(replies), bench.reply_tokens, bench.reply_spread))),
                tool_s=round(lognormal(next(waits), bench.tool_s, bench.tool_spread), 3),
            )
            for index in range(count)
        ]
        return RolloutWork(turns=turns, reward=float(next(rewards) < bench.pass_rate), score_s=round(bench.score_s, 3))

    prompt_tokens = bench.shared_tokens + bench.prompt_tokens
    return StepWork(
        groups=[
            GroupWork(prompt_tokens=prompt_tokens, rollouts=[rollout(counts.pop()) for _ in range(size)])
            for _ in range(groups)
        ]
    )


def _places(count: int, chance: random.Random) -> list[float]:
    """`count` numbers spread evenly over 0 to 1, in an order left to chance."""
    places = [(index + 0.5) / count for index in range(count)]
    chance.shuffle(places)
    return places


def lognormal(place: float, mean: float, spread: float) -> float:
    """The value below which the share `place` of a lognormal distribution with this mean and coefficient of variation
    lies."""
    if mean == 0.0 or spread == 0.0:
        return mean
    variance = math.log1p(spread**2)
    return mean * math.exp(math.sqrt(variance) * statistics.NormalDist().inv_cdf(place) - variance / 2.0)


def recorded(run: Path, *, steps: int) -> Workload:
    """The last `steps` steps of the run in folder `run`. Raises: ConfigError where there are none to replay."""
    files = sorted((run / "rollouts").glob("step-*.jsonl.zst"))[-steps:]
    if not files:
        raise ConfigError(
            f"{run} holds no rollouts of a step", remedy="Name a run's folder, or leave bench.workload out to draw one."
        )
    read_steps = [_step(list(read_rollouts(file))) for file in files]
    sizes = {(len(step.groups), len(group.rollouts)) for step in read_steps for group in step.groups}
    if len(sizes) > 1:
        raise ConfigError(
            f"the steps of {run} have groups of different sizes, or different numbers of groups",
            remedy="Take fewer of them: bench.steps = 1.",
        )
    prompts = [r.sequences[0].token_ids[: r.sequences[0].prompt_tokens] for r in read_rollouts(files[0]) if r.sequences]
    return Workload(source=f"recorded from {run}", shared_tokens=_common(prompts), steps=read_steps)


def read(path: Path) -> Workload:
    """A file of `write`. Raises: ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Workload)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"bench.workload {path} cannot be read: {error}",
            remedy="Name a run's folder, or a file that `bench --record` wrote.",
        ) from error


def write(workload: Workload, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(workload), indent=1))


def _step(rollouts: Sequence[Rollout]) -> StepWork:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    # A group whose rollouts all failed before their first reply does not say what its prompt was.
    longest = max(_prompts(rollouts), default=1)
    return StepWork(groups=[_group(members, otherwise=longest) for members in groups.values()])


def _group(members: Sequence[Rollout], *, otherwise: int) -> GroupWork:
    return GroupWork(
        prompt_tokens=max(_prompts(members), default=otherwise), rollouts=[_rollout(member) for member in members]
    )


def _prompts(rollouts: Sequence[Rollout]) -> list[int]:
    """Lengths, of those that have one."""
    return [rollout.sequences[0].prompt_tokens for rollout in rollouts if rollout.sequences]


def _rollout(rollout: Rollout) -> RolloutWork:
    turns: list[TurnWork] = []
    sequence, end = 0, -1
    for turn in rollout.turns:
        fresh = turn.sequence != sequence
        given = turn.start if fresh else turn.start - end if turns else 0
        turns.append(
            TurnWork(given_tokens=given, sampled_tokens=turn.end - turn.start, tool_s=turn.tool_s, fresh=fresh)
        )
        sequence, end = turn.sequence, turn.end
    reward = rollout.outcome.reward if isinstance(rollout.outcome, Scored) else None
    return RolloutWork(turns=turns, reward=reward, score_s=rollout.score_s)


def _longest(group: GroupWork, rollout: RolloutWork) -> int:
    longest = length = group.prompt_tokens
    for turn in rollout.turns:
        length = (0 if turn.fresh else length) + turn.given_tokens + turn.sampled_tokens
        longest = max(longest, length)
    return longest


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """Leading tokens that all have; at least one of each prompt stays its own."""
    length = 0
    while all(len(p) > length + 1 for p in prompts) and len({p[length] for p in prompts}) == 1:
        length += 1
    return length
