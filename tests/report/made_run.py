"""Run folders made of the repository's own structs: a small simulation, seeded, with everything a report can show.

Engines serve turns in order of arrival, tools take their time, rewards land when a checker ends, workers take the piece
that waits longest. No model, no clock: a step of hundreds of rollouts costs milliseconds.
"""

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tomli_w
import zstandard

from thundersync.core.types import Failed, Message, Rollout, Scored, TokenSequence, Turn, group_id, rollout_id
from thundersync.monitor import events as e

BEGAN_S = 1_795_000_000.0
TASKS = (
    "rename-report",
    "sort-names",
    "count-errors",
    "merge-tables",
    "fix-config",
    "find-largest",
    "split-log",
    "sum-column",
)


@dataclass
class MadeRun:
    """What to make; `hostile` goes into every text that a model, a command or a task can write."""

    name: str = "made"
    steps: int = 6
    groups: int = 4
    size: int = 8
    seed: int = 0
    engines: int = 1
    workers: int = 1
    seats: int = 12
    """Turns that an engine generates at a time."""
    turns: tuple[int, int] = (1, 6)
    hostile: str = ""
    evals: int = 3
    """Evaluations are made each so many steps; 0 = none."""
    finished: bool = True
    mode: str = "stream"
    learning_rate: float = 2e-5
    retry_share: float = 0.03
    lift: float = 0.5
    """Reward gained over the run."""


@dataclass
class _Step:
    events: list[e.AnyEvent] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    end_s: float = 0.0
    engine_s: float = 0.0
    trainer_s: float = 0.0


def make_run(parent: Path, made: MadeRun) -> Path:
    """Write the folder; returns it."""
    folder = parent / made.name
    (folder / "rollouts").mkdir(parents=True)
    (folder / "logs").mkdir()
    dice = random.Random(made.seed)
    events: list[e.AnyEvent] = [_started(made, folder)]
    rows = []
    at = BEGAN_S + 4.0
    if made.evals:
        at = _evaluation(events, 0, at, 0.2)
    for step in range(made.steps):
        skill = 0.2 + made.lift * step / max(1, made.steps - 1)
        done = _step(made, step, at + 0.2, skill, dice)
        row = _row(made, step, done, at, dice)
        events += done.events
        at = done.end_s
        events.append(e.StepCommitted(at_s=at, step=step, policy_version=step + 1, empty=False, metrics=row))
        rows.append(row)
        _write_rollouts(folder, step, done.rollouts)
        if made.evals and (step + 1) % made.evals == 0:
            at = _evaluation(events, step + 1, at + 0.1, 0.2 + made.lift * (step + 1) / made.steps)
    events.append(e.Warned(at_s=at, text=f"the event loop was 1.2 s late{made.hostile}"))
    events.append(e.CheckpointSaved(at_s=at, step=made.steps, path="checkpoints/step-000006"))
    if made.finished:
        events.append(e.RunFinished(at_s=at + 1.0, ok=True, steps=made.steps, seconds=at + 1.0 - BEGAN_S))
    (folder / "events.jsonl").write_bytes(b"".join(map(e.to_line, events)))
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    config = {
        "max_steps": made.steps, "seed": made.seed, "name": made.name,
        "model": {"name": f"made/model{made.hostile}"}, "algo": {"type": "grpo", "group_size": made.size},
        "optim": {"lr": made.learning_rate}, "trainer": {"micro_batch_tokens": 1024},
        "stream": {"mode": made.mode}, "env": {"path": "starter/train"},
    }  # fmt: skip
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    environment = {"Python": "3.11.7", "processor": f"a processor{made.hostile}", "GPUs": "none", "torch": "2.13.0"}
    (folder / "environment.json").write_bytes(msgspec.json.encode(environment))
    return folder


def _started(made: MadeRun, folder: Path) -> e.RunStarted:
    return e.RunStarted(
        at_s=BEGAN_S, name=made.name, run_dir=str(folder), pid=4242, model=f"made/model{made.hostile}", backend="vllm",
        runtime="process", algo="grpo", mode=made.mode, max_steps=made.steps, start_step=0,
        prompts_per_step=made.groups, group_size=made.size, seed=made.seed,
    )  # fmt: skip


def _evaluation(events: list[e.AnyEvent], version: int, at: float, reward: float) -> float:
    events.append(e.EvalStarted(at_s=at, policy_version=version, rollouts=18))
    name = f"eval-{version:06d}-00"
    events.append(e.RolloutStarted(at_s=at, rollout_id=f"{name}-00", group_id=name, task_id="held-out"))
    events.append(
        e.EvalFinished(at_s=at + 9.0, policy_version=version, reward_mean=reward, scored=18, failed=0, seconds=9.0)
    )
    return at + 9.0


def _step(made: MadeRun, step: int, opened: float, skill: float, dice: random.Random) -> _Step:
    done = _Step()
    names = [group_id(step, index) for index in range(made.groups)]
    tasks = [TASKS[(step * made.groups + index) % len(TASKS)] + made.hostile for index in range(made.groups)]
    emit = done.events.append
    emit(
        e.StepOpened(at_s=opened, step=step, policy_version=step, group_ids=names, task_ids=tasks, group_size=made.size)
    )
    rewards: dict[str, list[float]] = {name: [] for name in names}
    owed = dict.fromkeys(names, made.size)
    waiting = [deque[tuple[str, int]]() for _ in range(made.engines)]
    running = [0] * made.engines
    queue: deque[tuple[str, str]] = deque()
    free = list(range(made.workers))
    plans = {}

    def own_tokens(rollout: str) -> int:
        return 90 * len(plans[rollout][3])

    tick = itertools.count()
    passes = itertools.count(1)
    agenda: list[tuple[float, int, str, tuple]] = []

    def later(at: float, what: str, *rest: object) -> None:
        heapq.heappush(agenda, (at, next(tick), what, rest))

    for index, (name, task) in enumerate(zip(names, tasks, strict=True)):
        pace = dice.uniform(0.6, 2.2)
        for member in range(made.size):
            rollout = rollout_id(name, member)
            count = dice.randint(*made.turns)
            spans = [(dice.expovariate(1 / pace) + 0.4, dice.expovariate(1 / pace) * 1.5 + 0.05) for _ in range(count)]
            plans[rollout] = (name, task, index % made.engines, spans, dice.random() < made.retry_share)
            later(opened + 0.02 * member, "start", rollout, 1)

    def serve(engine: int, at: float) -> None:
        while waiting[engine] and running[engine] < made.seats:
            rollout, turn = waiting[engine].popleft()
            running[engine] += 1
            later(at + plans[rollout][3][turn][0], "generated", rollout, turn)

    def work(at: float) -> None:
        while queue and free:
            worker, taken = free.pop(0), [queue.popleft()]
            while queue and len(taken) < 3 and queue[0][0] == taken[0][0]:
                taken.append(queue.popleft())
            ids, number = [rollout for _, rollout in taken], next(passes)
            emit(
                e.PassStarted(
                    at_s=at,
                    worker=worker,
                    pass_id=number,
                    rollout_ids=ids,
                    tokens=sum(map(own_tokens, ids)),
                    queued=len(queue),
                )
            )
            later(at + 0.1 + 0.0035 * sum(map(own_tokens, ids)), "passed", worker, number, ids, at)

    last = opened
    while agenda:
        at, _, what, rest = heapq.heappop(agenda)
        last = max(last, at)
        match what, rest:
            case "start", (rollout, attempt):
                name, task, engine, _, fails = plans[rollout]
                emit(e.RolloutSeated(at_s=at, rollout_id=rollout, engine=engine))
                emit(e.RolloutStarted(at_s=at, rollout_id=rollout, group_id=name, task_id=task, attempt=attempt))
                if fails and attempt == 1:
                    later(at + 1.0, "fail", rollout)
                else:
                    later(at + 0.15, "turn", rollout, 0)
            case "fail", (rollout,):
                detail = f"the sandbox is gone: exit 137{made.hostile}"
                emit(
                    e.RolloutFailed(
                        at_s=at, rollout_id=rollout, group_id=plans[rollout][0], failure="sandbox", detail=detail,
                        will_retry=True,
                    )
                )  # fmt: skip
                later(at + 0.5, "start", rollout, 2)
            case "turn", (rollout, turn):
                emit(e.TurnStarted(at_s=at, rollout_id=rollout, turn=turn))
                engine = plans[rollout][2]
                waiting[engine].append((rollout, turn))
                serve(engine, at)
            case "generated", (rollout, turn):
                _, _, engine, spans, _ = plans[rollout]
                running[engine] -= 1
                done.engine_s += spans[turn][0]
                emit(
                    e.TurnGenerated(
                        at_s=at, rollout_id=rollout, turn=turn, sampled_tokens=28, prompt_tokens=120 + 90 * turn,
                        cached_tokens=160, generate_s=spans[turn][0], finish_reason="stop",
                    )
                )  # fmt: skip
                emit(e.ToolStarted(at_s=at, rollout_id=rollout, turn=turn, command=f"sort names.txt{made.hostile}"))
                later(at + spans[turn][1], "tool", rollout, turn)
                serve(engine, at)
            case "tool", (rollout, turn):
                emit(
                    e.ToolFinished(
                        at_s=at, rollout_id=rollout, turn=turn, exit_code=0, tool_s=plans[rollout][3][turn][1]
                    )
                )
                if turn + 1 < len(plans[rollout][3]):
                    later(at, "turn", rollout, turn + 1)
                else:
                    emit(e.ScoringStarted(at_s=at, rollout_id=rollout))
                    later(at + 0.4, "scored", rollout)
            case "scored", (rollout,):
                name, task, _, spans, _ = plans[rollout]
                reward = 1.0 if dice.random() < skill else dice.choice([0.0, 0.0, 0.5])
                rewards[name].append(reward)
                emit(
                    e.RolloutScored(
                        at_s=at, rollout_id=rollout, group_id=name, reward=reward, stop="submitted", turns=len(spans),
                        sampled_tokens=28 * len(spans), score_s=0.4,
                    )
                )  # fmt: skip
                done.rollouts.append(_rollout(made, step, rollout, name, task, spans, reward, opened))
                queue.append((name, rollout))
                if made.mode == "stream" or sum(map(len, rewards.values())) == made.groups * made.size:
                    work(at)
            case "passed", (worker, number, ids, began):
                done.trainer_s += at - began
                emit(e.PassDone(at_s=at, worker=worker, pass_id=number, rollout_ids=ids, busy_s=at - began))
                free.append(worker)
                for rollout in ids:
                    name = plans[rollout][0]
                    owed[name] -= 1
                    if not owed[name]:
                        flat = len(set(rewards[name])) == 1
                        emit(e.GroupClosed(at_s=at, group_id=name, rewards=rewards[name], flat=flat))
                work(at)
    emit(e.WeightsPublished(at_s=last + 1.6, policy_version=step + 1, publish_s=0.4))
    done.end_s = last + 1.62
    done.rollouts.sort(key=lambda rollout: rollout.rollout_id)
    return done


def _row(made: MadeRun, step: int, done: _Step, at: float, dice: random.Random) -> dict[str, float]:
    seconds = done.end_s - at - 0.2
    rewards = [r.outcome.reward for r in done.rollouts if isinstance(r.outcome, Scored)]
    return {
        "step": float(step), "reward_mean": sum(rewards) / max(1, len(rewards)), "step_s": seconds,
        "engine_busy": min(1.0, done.engine_s / seconds / made.engines / made.seats * 1.6),
        "trainer_busy": (done.trainer_s / made.workers + 1.2) / seconds, "commit_s": 1.2, "publish_s": 0.4,
        "tokens": float(sum(r.sampled_tokens for r in done.rollouts)), "grad_norm": 0.8 + dice.random() * 0.5,
        "lr": made.learning_rate, "mismatch_mean": 0.002 + dice.random() * 0.001, "mismatch_max": 0.05,
        "staleness": 0.0,
        "turns_mean": 3.4, "queue_wait_s": 2.0, "trainer_memory_peak_gib": 3.1 + 0.1 * dice.random(),
        "groups_mixed": float(made.groups - 1), "groups_flat": 1.0, "groups_dropped": 0.0,
        "truncated_share": 0.1, "empty": 0.0,
    }  # fmt: skip


def _rollout(
    made: MadeRun,
    step: int,
    rollout: str,
    name: str,
    task: str,
    spans: list[tuple[float, float]],
    reward: float,
    at: float,
) -> Rollout:
    messages = [
        Message(role="system", content="You are a shell agent."),
        Message(role="user", content="Make a folder."),
        Message(role="assistant", content="```bash\nmkdir it\nsubmit\n```"),
        Message(role="user", content=f"Sort the lines of names.txt into sorted.txt.{made.hostile}"),
    ]
    turns = []
    for index, (generate_s, tool_s) in enumerate(spans):
        messages.append(Message(role="assistant", content=f"```bash\nsort names.txt > sorted.txt\n```{made.hostile}"))
        messages.append(Message(role="user", content=f"sorted {index + 1} of {len(spans)}{made.hostile}"))
        turns.append(
            Turn(
                index=index, sequence=0, start=3 + 2 * index, end=5 + 2 * index, finish_reason="stop",
                policy_version=step, command="sort names.txt > sorted.txt", exit_code=0, generate_s=generate_s,
                tool_s=tool_s,
            )
        )  # fmt: skip
    count = 2 * len(spans)
    sequence = TokenSequence(
        token_ids=list(range(3 + count)), sampled=[False] * 3 + [True] * count, logprobs=[0.0] * 3 + [-0.5] * count,
        prompt_tokens=3,
    )  # fmt: skip
    return Rollout(
        rollout_id=rollout, group_id=name, task_id=task, policy_version=step, messages=messages, sequences=[sequence],
        turns=turns, outcome=Scored(reward=reward, stop="submitted"), started_s=at,
        generate_s=sum(span[0] for span in spans), tool_s=sum(span[1] for span in spans), score_s=0.4,
    )  # fmt: skip


def failed_rollout(rollout: Rollout, detail: str) -> Rollout:
    """The same, had its world failed."""
    return msgspec.structs.replace(rollout, outcome=Failed(reason="sandbox", detail=detail))


def _write_rollouts(folder: Path, step: int, rollouts: list[Rollout]) -> None:
    lines = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
    path = folder / "rollouts" / f"step-{step:06d}.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=1).compress(lines))
