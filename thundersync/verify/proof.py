"""The proof of a configuration: one real step, recorded; its one-piece gradient; and every way of streaming it.

Uses a run's own parts (engines, sandboxes, trainer workers) and commits nothing. How a way is worked is `arms`'
business, how it is shown `report`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import structs

from thundersync.assembly import Parts
from thundersync.config import DISTILLING, Config
from thundersync.core.objective import SeparableObjective
from thundersync.core.ready_queue import PARTS_PER_COHORT
from thundersync.core.types import Failed, RolloutId
from thundersync.errors import NothingToVerify
from thundersync.learn import messages as m
from thundersync.learn.link import WorkerLink
from thundersync.learn.rows import piece_rows
from thundersync.learn.stream import GradientStream
from thundersync.learn.turn_stream import TurnStream
from thundersync.placement import Dtype, Placement
from thundersync.recipe import kl_in_reward, objective_of
from thundersync.step import WorkedStep
from thundersync.verify import recording as rec
from thundersync.verify import textbook
from thundersync.verify.arms import Arm, Replayer, reward_arms, turn_arms
from thundersync.verify.audit import smallest_group, textbook_of
from thundersync.verify.findings import Finding, Proof, Reference
from thundersync.verify.recording import Recording
from thundersync.verify.reference import compare, keep_reference, rounding_floor
from thundersync.verify.tolerance import says_nothing, tolerance


async def prove(config: Config, parts: Parts, placement: Placement, *, say: Callable[[str], None]) -> Proof:
    """One step's rollouts with `parts`, then everything of `Prover`. Raises NothingToVerify, and what breaks a run."""
    driver = parts.driver
    say(f"taking {config.algo.prompts_per_step} x {config.algo.group_size} rollouts; nothing will be committed")
    worked = await driver.work(0, await parts.source.take(0))
    path = await parts.folder.write_rollouts(0, worked.stream.rollouts)
    say(f"recorded: {path}")
    for worker, cpus in zip(parts.workers, placement.learning_alone(), strict=False):
        await worker.call(m.Pin(cpus=cpus), m.Done, limit_s=config.stall_timeout_s)
    prover = Prover(
        config,
        parts.workers,
        shares_prompts=driver.shares_prompts,
        max_parts=driver.room.most,
        dtype=placement.dtype,
        bits_repeat=not placement.on_gpus,
        say=say,
        objective=parts.objective,
    )
    recording = record(worked, driver.policy_version)
    if not prover.flat(recording):
        await prover.refer(textbook_of(worked.stream, config, parts.objective))
        await prover.find(Arm(path="as it ran", order="as it ran", names=[]), worked.stream)
    return await prover.prove(recording)


def record(worked: WorkedStep, policy_version: int) -> Recording:
    """Raises NothingToVerify where nothing was scored, or something was not finite."""
    stream = worked.stream
    if stream.bad:
        raise NothingToVerify(
            f"the gradient of {', '.join(sorted(set(stream.bad)))} has values that are not finite",
            remedy="Look at these rollouts in the run folder; see whether model.dtype = float32 changes it.",
        )
    failed = [rollout.outcome for rollout in stream.rollouts if isinstance(rollout.outcome, Failed)]
    if failed and len(failed) == len(stream.rollouts):
        raise NothingToVerify(
            f"not one of {len(failed)} rollouts could be scored; the first: {failed[0].reason}, {failed[0].detail}",
            remedy="Mend that first; see the logs in the run folder.",
        )
    if isinstance(stream, TurnStream):
        return rec.of_turns(policy_version, worked.groups, worked.prompts, stream.rollouts, stream.turns)
    return rec.of_rewards(policy_version, worked.groups, worked.prompts, stream.landed)


class Prover:
    """Compares every way a recording's gradient can take with its one-piece gradient."""

    def __init__(
        self,
        config: Config,
        workers: Sequence[WorkerLink],
        *,
        shares_prompts: bool,
        max_parts: int,
        dtype: Dtype,
        bits_repeat: bool,
        say: Callable[[str], None],
        objective: SeparableObjective | None = None,
    ) -> None:
        """`max_parts` of each worker; `bits_repeat`: the same kernels on the same numbers give the same bits."""
        self._config = config
        self._objective = objective or objective_of(config)
        self._name = config.algo.type if objective is None else type(objective).__name__
        self._whole_step = self._objective.cohort == "step"
        self._workers = workers
        self._replayer = Replayer(
            config, workers, shares_prompts=shares_prompts, max_parts=max_parts, objective=objective
        )
        self._shares_prompts = shares_prompts
        self._max_parts = max_parts
        self._dtype: Dtype = dtype
        self._bits_repeat = bits_repeat
        self._say = say
        self._floor: m.Comparison | None = None
        """Of the reference that the workers keep."""
        self._references: list[Reference] = []
        self._notes: list[str] = []
        self._findings: list[Finding] = []

    def flat(self, recording: Recording) -> list[list[RolloutId]]:
        """Groups whose rewards are all equal: there would be nothing to compare."""
        return [] if recording.turns else rec.flat_cohorts(recording, whole_step=self._whole_step)

    async def prove(self, recording: Recording) -> Proof:
        """Raises: NothingToVerify, WorkerLost."""
        await self._replayer.forget()
        if recording.turns:
            if self._floor is None:
                await self.refer(textbook.of_turns(recording.turns.values(), self._objective))
            await self._work_all(recording, list(turn_arms(recording, may_be_cut=self._shares_prompts)))
        else:
            await self._prove_rewards(recording)
        return self._proof(recording)

    async def refer(self, book: textbook.Textbook) -> None:
        """From now on compare with the one-piece gradient of `book`."""
        if not book.pieces:
            raise NothingToVerify("no rollout of the recorded step has a gradient", remedy="Raise --groups or --size.")
        began_s, limit_s = time.monotonic(), self._config.stall_timeout_s
        self._say(f"the one-piece gradient of {len(book.pieces)} sequences, and how far rounding moves it")
        await keep_reference(self._workers, book, limit_s=limit_s)
        kept_s = time.monotonic() - began_s
        floor = self._floor = await rounding_floor(self._workers, book, limit_s=limit_s)
        if says_nothing(floor, self._dtype):
            raise self._nothing(floor)
        self._references.append(Reference(norm=floor.norm, seconds=kept_s, floor=floor.relative_l2, worst=floor.worst))

    async def find(
        self, arm: Arm, stream: GradientStream | TurnStream, *, seconds: float = 0.0, digest: str = ""
    ) -> str:
        """Compare what `stream` left in the workers with their reference. Gives its bits' digest; `digest` is the one
        wanted."""
        found = await compare(self._workers, stream.scales(), limit_s=self._config.stall_timeout_s)
        assert self._floor is not None
        allowed = tolerance(self._floor)
        same = found.digest == digest if digest else None
        exact = found.relative_l2 <= allowed and (same is not False or not self._bits_repeat)
        self._findings.append(
            Finding(
                path=arm.path,
                order=arm.order,
                relative_l2=found.relative_l2,
                worst=found.worst,
                worst_name=found.worst_name,
                tolerance=allowed,
                same_bits=same,
                ok=exact,
                passes=stream.sums.passes,
                parts=stream.sums.parts_peak,
                seconds=seconds,
            )
        )
        self._say(f"{arm.path}, {arm.order}: {found.relative_l2:.1e}{'' if exact else ' NOT EXACT'} ({seconds:.0f} s)")
        return found.digest

    async def _prove_rewards(self, recording: Recording) -> None:
        if flat := self.flat(recording):
            self._notes.append(_replaced(flat, whole_step=self._whole_step))
            recording = recording.with_rewards({n: r for names in flat for n, r in rec.graded(names).items()})
        rewards = await self._rewards(recording)
        if self._floor is None:
            await self.refer(self._rollout_book(recording, rewards))
        may_be_cut = self._shares_prompts and self._config.algo.mismatch != "seq_mask"
        if not self._max_parts:
            self._notes.append("stream.partials_gib has no room for parts: pieces wait as tokens, then go direct")
        arms = reward_arms(
            recording,
            max_parts=self._max_parts,
            may_be_cut=may_be_cut,
            may_be_held=not self._objective.weights(1).known,
        )
        await self._work_all(recording, list(arms))
        if self._max_parts >= PARTS_PER_COHORT and not rec.folds(recording, rewards, whole_step=self._whole_step):
            await self._prove_folding(recording)

    async def _prove_folding(self, recording: Recording) -> None:
        """Rewards of more values, with a reference of their own, so that parts have to fold."""
        arrived = [name for name in recording.names if name in rec.scored(recording.rollouts)]
        cohorts = [arrived] if self._whole_step else [
            [name for name in arrived if name in ids] for ids in recording.groups.values()
        ]  # fmt: skip
        graded = recording.with_rewards({n: r for names in cohorts for n, r in rec.graded(names).items()})
        rewards = await self._rewards(graded)
        if not rec.folds(graded, rewards, whole_step=self._whole_step):
            self._notes.append(f"parts fold only in groups of {rec.FOLDS_FROM} or more: raise --size to see that way")
            return
        self._notes.append("parts fold at a third distinct reward: for that way, rewards were 0, 1, 0.5, 0.25, ...")
        await self.refer(self._rollout_book(graded, rewards))
        await self._work(graded, Arm(path="folded parts", order="as they came", names=graded.names))
        await self._work(graded, Arm(path="folded parts", order="reversed", names=graded.names[::-1]))

    async def _work_all(self, recording: Recording, arms: Sequence[Arm]) -> None:
        """Each once, and the first one again: the same order has to give the same bits."""
        first = await self._work(recording, arms[0])
        if len(self._workers) == 1:
            await self._work(recording, structs.replace(arms[0], order="the same again"), digest=first)
        else:
            self._notes.append("which worker takes a piece is a matter of time: the same order may give other bits")
        for arm in arms[1:]:
            await self._work(recording, arm)

    async def _work(self, recording: Recording, arm: Arm, *, digest: str = "") -> str:
        began_s = time.monotonic()
        stream = await self._replayer.work(recording, arm)
        found = await self.find(arm, stream, seconds=time.monotonic() - began_s, digest=digest)
        await self._replayer.forget()
        return found

    async def _rewards(self, recording: Recording) -> dict[RolloutId, float]:
        """As the objective sees them: less the KL that is taken off them."""
        rewards, share = rec.scored(recording.rollouts), kl_in_reward(self._config)
        for rollout in recording.rollouts if share else []:
            if rollout.rollout_id in rewards:
                rows = piece_rows(rollout, self._objective.weights(rollout.sampled_tokens), 1.0)
                request, limit_s = m.MeasureKl(rows=rows), self._config.stall_timeout_s
                measured = await self._workers[0].call(request, m.Scores, limit_s=limit_s)
                rewards[rollout.rollout_id] -= share * sum(measured.logprobs)
        return rewards

    def _rollout_book(self, recording: Recording, rewards: dict[RolloutId, float]) -> textbook.Textbook:
        return textbook.of_rollouts(
            recording.rollouts,
            rewards,
            self._objective,
            min_group_size=smallest_group(self._config),
            skip_flat=self._config.algo.zero_variance == "skip",
        )

    def _nothing(self, floor: m.Comparison) -> NothingToVerify:
        moved = f"one unit in the last place moves it by {floor.relative_l2:.1e}" if floor.norm else "it is zero"
        sentence = f"the one-piece gradient (norm {floor.norm:.1e}) is rounding, {moved}"
        if self._config.algo.type in DISTILLING:
            return NothingToVerify(
                f"{sentence}: teacher and policy agree",
                remedy="Verify with a teacher whose weights differ from the policy's.",
            )
        return NothingToVerify(
            f"{sentence}: the rollouts of a group are all alike",
            remedy="Raise --groups, --size or rollout.temperature.",
        )

    def _proof(self, recording: Recording) -> Proof:
        lora = self._config.model.lora
        return Proof(
            objective=f"{self._name}: {self._objective.formula()}",
            trains="every weight" if lora is None else f"adapters of rank {lora.rank}",
            dtype=self._dtype,
            workers=len(self._workers),
            groups=len(recording.groups),
            rollouts=len(recording.rollouts),
            tokens=sum(rollout.sampled_tokens for rollout in recording.rollouts),
            references=self._references,
            notes=self._notes,
            findings=self._findings,
            ok=all(finding.ok for finding in self._findings),
        )


def _replaced(cohorts: Sequence[Sequence[RolloutId]], *, whole_step: bool) -> str:
    flat = "all the step's rewards" if whole_step else f"the rewards of {len(cohorts)} of the groups"
    return f"{flat} were equal: replaced by 0, 1, 0.5, 0.25, ... so that there is a gradient; the tokens are real"
