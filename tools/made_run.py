"""A believable run that never happened, for pictures and tests: `python tools/made_run.py FOLDER` writes its folder.

Seeded, so that everybody sees the same one. A small simulation with a clock of its own: rollouts of repairs with heavy
tails, engines, sandboxes, trainer workers that take what has landed; told in the feed's own events, with the rollouts
themselves as files (`tools/made_rollouts.py`).
"""

import heapq
import random
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import msgspec
import zstandard
from msgspec import Struct

from thundersync.core.types import Rollout, group_id, rollout_id
from thundersync.monitor import events as e
from thundersync.rundir import write_whole

BEGAN_S = 1_795_000_000.0
TASKS = (
    "pandas-dev__pandas.95280573.func_pm_class_rm_funcs__k3v9",
    "marshmallow.9716fc62.lm_rewrite__8vq1",
    "starlette.db5063c2.combine_file__x2jd",
    "sqlparse.e57923b3.func_basic__q9zl",
    "click.fde47b4b.pr_2369",
    "jinja.ada0a9a6.lm_modify__3nfu",
    "arrow.1d70d009.func_pm_ctrl_shuffle__0b5y",
    "parso.338a5760.combine_module__ttv2",
)
Process = Generator["float | None", None, None]
"""Yields the seconds it takes, or None to sleep until it is woken."""


class Shape(Struct, frozen=True, kw_only=True):
    """How large the run is, and how it ends."""

    steps: int = 12
    max_steps: int = 12
    groups: int = 4
    size: int = 8
    engines: int = 2
    workers: int = 2
    concurrency: int = 26
    seed: int = 7
    start: int = 0
    evals: bool = True
    ended: bool = True
    """False: it stops in the middle of the step after `steps`, as a live run looks."""


class Trace(Struct):
    """What a rollout did, for its file."""

    rollout_id: str
    group_id: str
    task_id: str
    step: int
    turns: list[tuple[int, float, float]]
    """Sampled tokens, seconds of generation, seconds of its tool."""
    started_s: float
    score_s: float = 0.0
    reward: float | None = None


def made_run(shape: Shape | None = None, *, keep: Callable[[Trace], None] | None = None) -> Iterator[e.AnyEvent]:
    """Its events in order. `keep` gets each rollout once it is scored."""
    return iter(_World(shape or Shape(), keep).run())


class _World:
    def __init__(self, shape: Shape, keep: Callable[[Trace], None] | None) -> None:
        self.shape, self._keep = shape, keep
        self.dice = random.Random(shape.seed)
        self.now_s = BEGAN_S
        self._told: list[e.AnyEvent] = []
        self._heap: list[tuple[float, int, Process]] = []
        self._count = 0
        self._asleep: set[int] = set()
        self.generating: set[str] = set()
        self.tools: set[str] = set()
        self.busy_workers: set[int] = set()
        self.queue: list[Trace] = []
        self.pass_id = 0

    def run(self) -> list[e.AnyEvent]:
        shape = self.shape
        self._tell_start()
        for step in range(shape.start, shape.steps):
            if shape.evals and step % 6 == 0:
                self._evaluate(step)
            self._step(step, until=1.0)
        if shape.ended:
            if shape.evals:
                self._evaluate(shape.steps)
            self.emit(e.CheckpointSaved(at_s=self.now_s, step=shape.steps, path=f"checkpoints/step-{shape.steps:06d}"))
            shares = {"generation": 0.86, "learning": 0.49, "commit": 0.02, "publish": 0.01, "eval": 0.05}
            seconds = self.now_s - BEGAN_S
            self.emit(e.RunFinished(at_s=self.now_s, ok=True, steps=shape.steps, seconds=seconds, shares=shares))
        else:
            self._step(shape.steps, until=0.62)
        return self._told

    def emit(self, event: e.AnyEvent) -> None:
        self._told.append(event)

    def start(self, process: Process) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now_s, self._count, process))

    def _tell_start(self) -> None:
        shape = self.shape
        self.emit(
            e.RunStarted(
                at_s=self.now_s, name="swe-8b-lora", run_dir="runs/swe-8b-lora", pid=4242, model="Qwen/Qwen3-8B",
                backend="vllm", runtime="docker", algo="grpo", mode="stream", max_steps=shape.max_steps,
                start_step=shape.start, prompts_per_step=shape.groups, group_size=shape.size, seed=shape.seed,
                engine_devices=shape.engines, trainer_devices=shape.workers, on_gpus=True,
            )
        )  # fmt: skip
        self.emit(e.WeightsPublished(at_s=self.now_s, policy_version=shape.start, publish_s=1.3))

    def _turn_clock(self, over: Callable[[], bool]) -> None:
        """Let time pass until nothing is left to happen or `over`."""
        while self._heap and not over():
            self.now_s, number, process = heapq.heappop(self._heap)
            wait_s = next(process, -1.0)
            if wait_s is not None and wait_s >= 0.0:
                heapq.heappush(self._heap, (self.now_s + wait_s, number, process))

    def _evaluate(self, version: int) -> None:
        self.emit(e.EvalStarted(at_s=self.now_s, policy_version=version, rollouts=16))
        began_s, name, rewards = self.now_s, f"eval-{version:06d}", []
        for index in range(16):
            self.now_s += self.dice.uniform(2, 6)
            group = f"{name}-{index:02d}"
            reward = float(self.dice.random() < 0.2 + 0.5 * version / self.shape.max_steps)
            rewards.append(reward)
            self.emit(
                e.RolloutScored(
                    at_s=self.now_s, rollout_id=rollout_id(group, 0), group_id=group, reward=reward, stop="submitted",
                    turns=9, sampled_tokens=2400, score_s=3.0,
                )
            )  # fmt: skip
        self.emit(
            e.EvalFinished(
                at_s=self.now_s, policy_version=version, reward_mean=sum(rewards) / 16, scored=16, failed=0,
                pass_at_1=sum(rewards) / 16,
                seconds=self.now_s - began_s,
            )
        )  # fmt: skip

    def _step(self, step: int, *, until: float) -> None:
        _Step(self, step).work(until)


class _Step:
    """One step: its rollouts and workers as processes, its commit at the end."""

    def __init__(self, world: _World, step: int) -> None:
        self.world, self.step, self.shape, self.dice = world, step, world.shape, world.dice
        self.opened_s = world.now_s
        self.skill = 0.18 + 0.62 * step / max(1, self.shape.max_steps)
        self.groups = {group_id(step, index): self._task(index) for index in range(self.shape.groups)}
        self.hard = {group: self.dice.uniform(-0.12, 0.2) for group in self.groups}
        self.rewards: dict[str, list[float]] = {group: [] for group in self.groups}
        self.owed = dict.fromkeys(self.groups, self.shape.size)
        self.places = self.shape.concurrency
        self.sampled = self.busy_s = 0.0
        self.open_groups: set[str] = set()

    def _task(self, index: int) -> str:
        return TASKS[(self.step * self.shape.groups + index) % len(TASKS)]

    def _seat(self, group: str) -> int:
        """A group's rollouts share an engine, and with it their prompt."""
        return list(self.groups).index(group) % self.shape.engines

    def work(self, until: float) -> None:
        world, shape = self.world, self.shape
        world.emit(
            e.StepOpened(
                at_s=world.now_s, step=self.step, policy_version=self.step, group_ids=list(self.groups),
                task_ids=list(self.groups.values()), group_size=shape.size,
            )
        )  # fmt: skip
        names = [(rollout_id(group, i), group) for group in self.groups for i in range(shape.size)]
        for name, group in names:
            world.start(self._rollout(name, group))
        for worker in range(shape.workers):
            world.start(self._worker(worker))
        world.start(self._gauges())
        done = lambda: not any(self.owed.values())  # noqa: E731
        if until < 1.0:
            done = lambda: sum(self.owed.values()) <= (1 - until) * len(names)  # noqa: E731
        world._turn_clock(done)
        if until == 1.0:
            world._heap.clear()
            world.queue.clear()
            self._commit()

    def _rollout(self, name: str, group: str) -> Process:
        world, dice = self.world, self.dice
        while self.places == 0:
            yield 0.5
        self.places -= 1
        trace = Trace(name, group, self.groups[group], self.step, [], world.now_s)
        attempt = 1
        world.emit(e.RolloutStarted(at_s=world.now_s, rollout_id=name, group_id=group, task_id=trace.task_id))
        world.emit(e.RolloutSeated(at_s=world.now_s, rollout_id=name, engine=self._seat(group)))
        yield (start_s := dice.uniform(0.6, 2.5))
        if dice.random() < 0.03:
            attempt += 1
            text = "the container was killed: out of memory"
            world.emit(
                e.RolloutFailed(
                    at_s=world.now_s, rollout_id=name, group_id=group, failure="sandbox", detail=text, will_retry=True
                )
            )
            yield 1.0
            world.emit(
                e.RolloutStarted(
                    at_s=world.now_s, rollout_id=name, group_id=group, task_id=trace.task_id, attempt=attempt
                )
            )
            yield (start_s := dice.uniform(0.6, 2.5))
        world.emit(e.SandboxStarted(at_s=world.now_s, rollout_id=name, start_s=start_s))
        turns = min(18, 2 + int(dice.lognormvariate(1.35, 0.55)))
        slow = dice.lognormvariate(0.0, 0.45)
        for turn in range(turns):
            yield from self._turn(trace, turn, slow)
        world.emit(e.ScoringStarted(at_s=world.now_s, rollout_id=name))
        trace.score_s = dice.lognormvariate(1.5, 0.5)
        yield trace.score_s
        chance = self.skill + self.hard[group] - 0.012 * turns
        trace.reward = 1.0 if dice.random() < chance else dice.choice((0.0, 0.0, 0.0, 0.5))
        self.places += 1
        world.emit(
            e.RolloutScored(
                at_s=world.now_s, rollout_id=name, group_id=group, reward=trace.reward,
                stop="submitted" if dice.random() < 0.93 else "max_turns", turns=turns,
                sampled_tokens=sum(each[0] for each in trace.turns), score_s=trace.score_s,
            )
        )  # fmt: skip
        self.rewards[group].append(trace.reward)
        world.queue.append(trace)
        if world._keep is not None:
            world._keep(trace)

    def _turn(self, trace: Trace, turn: int, slow: float) -> Process:
        world, dice, name = self.world, self.dice, trace.rollout_id
        world.emit(e.TurnStarted(at_s=world.now_s, rollout_id=name, turn=turn))
        tokens = max(24, int(dice.lognormvariate(5.0, 0.6)))
        seconds = tokens / dice.uniform(38, 62) * (1 + len(world.generating) / 30)
        world.generating.add(name)
        yield seconds
        world.generating.discard(name)
        prompt = 1800 + 420 * turn
        self.sampled += tokens
        world.emit(
            e.TurnGenerated(
                at_s=world.now_s, rollout_id=name, turn=turn, sampled_tokens=tokens, prompt_tokens=prompt,
                cached_tokens=int(prompt * (0.0 if turn == 0 and dice.random() < 0.2 else 0.93)), generate_s=seconds,
                finish_reason="stop",
            )
        )  # fmt: skip
        command = dice.choice(COMMANDS)
        world.emit(e.ToolStarted(at_s=world.now_s, rollout_id=name, turn=turn, command=command))
        tool_s = min(60.0, dice.lognormvariate(0.35, 1.05) * slow * (3.0 if "pytest" in command else 1.0))
        world.tools.add(name)
        yield tool_s
        world.tools.discard(name)
        world.emit(
            e.ToolFinished(
                at_s=world.now_s, rollout_id=name, turn=turn, exit_code=int(dice.random() < 0.25), tool_s=tool_s
            )
        )
        trace.turns.append((tokens, seconds, tool_s))
        yield 0.02

    def _worker(self, worker: int) -> Process:
        world = self.world
        while True:
            if not world.queue:
                yield 0.3
                continue
            taken = [world.queue.pop(0)]
            same = [
                each for each in world.queue if each.group_id == taken[0].group_id and each.reward == taken[0].reward
            ]
            for each in same[:1]:
                world.queue.remove(each)
                taken.append(each)
            world.pass_id += 1
            pass_id = world.pass_id
            tokens = sum(turn[0] + 420 for each in taken for turn in each.turns)
            names = [each.rollout_id for each in taken]
            self.open_groups.add(taken[0].group_id)
            world.busy_workers.add(worker)
            busy_s = tokens / 760
            world.emit(
                e.PassStarted(
                    at_s=world.now_s, worker=worker, pass_id=pass_id, rollout_ids=names, tokens=tokens,
                    queued=len(world.queue),
                )
            )  # fmt: skip
            yield busy_s
            world.busy_workers.discard(worker)
            self.busy_s += busy_s
            world.emit(e.PassDone(at_s=world.now_s, worker=worker, pass_id=pass_id, rollout_ids=names, busy_s=busy_s))
            group = taken[0].group_id
            self.owed[group] -= len(taken)
            if not self.owed[group]:
                rewards = self.rewards[group]
                self.open_groups.discard(group)
                world.emit(
                    e.GroupClosed(at_s=world.now_s, group_id=group, rewards=rewards, flat=len(set(rewards)) == 1)
                )

    def _gauges(self) -> Process:
        world, shape, dice = self.world, self.shape, self.dice
        while True:
            yield 2.0
            running = len(world.generating)
            share = min(1.0, running / 3 / shape.engines) if running else 0.0
            speeds = [running / shape.engines * dice.uniform(34, 44) for _ in range(shape.engines)]
            engines = [
                e.EngineGauge(
                    running=running // shape.engines + (index < running % shape.engines), busy=share,
                    tokens_per_s=speed, prompt_tokens_per_s=speed * 11.0, cached_share=dice.uniform(0.88, 0.94),
                    kv_asked=running / shape.engines * dice.uniform(0.021, 0.029),
                )
                for index, speed in enumerate(speeds)
            ]  # fmt: skip
            world.emit(
                e.Gauges(
                    at_s=world.now_s, engine_busy=share, trainer_busy=len(world.busy_workers) / shape.workers,
                    generate_running=running, tools_running=len(world.tools), queue_pieces=len(world.queue),
                    open_slots=2 * len(self.open_groups), loop_lag_ms=dice.uniform(0.1, 1.4),
                    tokens_per_s=sum(speeds), engines=engines,
                )
            )  # fmt: skip

    def _commit(self) -> None:
        world, shape = self.world, self.shape
        worked_s = world.now_s
        world.now_s += 3.1
        world.emit(e.WeightsPublished(at_s=world.now_s, policy_version=self.step + 1, publish_s=1.2))
        seconds = world.now_s - self.opened_s
        rewards = [reward for each in self.rewards.values() for reward in each]
        mean = sum(rewards) / len(rewards)
        idle_s = max(0.0, seconds - self.busy_s / shape.workers)
        metrics = {
            "reward_mean": mean, "reward_std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
            "step_s": seconds, "engine_busy": 0.93 - 0.1 * self.dice.random(),
            "trainer_busy": 1 - idle_s / seconds, "queue_wait_s": 4.2, "tokens": self.sampled,
            "grad_norm": 0.4 + 0.3 * self.dice.random(), "lr": 1e-5, "mismatch_mean": 0.0013, "mismatch_max": 0.021,
            "staleness": 0.0, "commit_s": 1.9, "publish_s": 1.2, "between_s": world.now_s - worked_s,
        }  # fmt: skip
        world.emit(
            e.StepCommitted(
                at_s=world.now_s, step=self.step, policy_version=self.step + 1, empty=False, metrics=metrics
            )
        )
        if self.step % 5 == 2:
            text = "the trainer idled 46 % of the step; more prompts_per_step would fill it"
            world.emit(e.Warned(at_s=world.now_s, text=f"step {self.step}: {text}"))
        world.now_s += 0.4


COMMANDS = (
    "grep -rn 'def to_datetime' --include=*.py src | head",
    "sed -n 120,180p src/core/resample.py",
    "python -m pytest tests/test_resample.py -x -q",
    "git diff --stat",
    "python - <<'PY'\nimport core\nprint(core.resample([1, 2, 3]))\nPY",
    "ls -la && git log --oneline | head -3",
    "sed -i 's/>= start/> start/' src/core/resample.py",
)


def write_run(folder: Path, shape: Shape | None = None) -> Path:
    """Write the folder of a made run: `events.jsonl`, the rollouts of its steps, a tokenizer. Returns the folder."""
    from tools.made_rollouts import Writer

    writer, rollouts = Writer(), dict[int, list[Rollout]]()
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    told = made_run(shape, keep=lambda trace: rollouts.setdefault(trace.step, []).append(writer.rollout(trace)))
    write_whole(folder / "events.jsonl", b"".join(map(e.to_line, told)))
    for step, ended in rollouts.items():
        lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in ended)
        write_whole(folder / "rollouts" / f"step-{step:06d}.jsonl.zst", zstandard.compress(lines))
    checkpoint = folder / "checkpoints" / "step-000012"
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_whole(checkpoint / "tokenizer.json", msgspec.json.encode(writer.tokenizer()))
    return folder


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    print(write_run(Path(sys.argv[1])))
