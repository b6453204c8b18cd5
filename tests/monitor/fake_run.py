"""A believable run, as its feed would tell it: seeded, so every test sees the same one."""

import random
from collections.abc import Iterator

from thundersync.core.types import group_id, rollout_id
from thundersync.monitor import events as e

TASKS = ["make-folder-03", "remove-file-01", "count-lines-07", "rename-report-02", "sort-names-05", "copy-config-04"]


def fake_run(
    *, steps: int = 3, groups: int = 4, size: int = 8, seed: int = 0, start: int = 0, evals: bool = True
) -> Iterator[e.AnyEvent]:
    dice, at = random.Random(seed), 1_700_000_000.0

    def now() -> float:
        nonlocal at
        at += dice.expovariate(12)
        return at

    yield e.RunStarted(
        at_s=now(), name="20261129-1624-smollm2", run_dir="runs/20261129-1624-smollm2", pid=4242,
        model="SmolLM2-135M-Instruct", backend="vllm", runtime="process", algo="grpo", mode="stream",
        max_steps=steps, start_step=start, prompts_per_step=groups, group_size=size, seed=42,
    )  # fmt: skip
    if evals:
        yield from fake_eval(0, 0.16, now, dice)
    for step in range(start + 1, steps + 1):
        skill = 0.16 + 0.5 * step / steps
        yield from fake_step(step, groups, size, skill, now, dice)
        if evals and step == steps:
            yield from fake_eval(step, 0.63, now, dice)
    yield e.CheckpointSaved(at_s=now(), step=steps, path=f"checkpoints/step-{steps:06d}")
    yield e.RunFinished(
        at_s=now(), ok=True, steps=steps, seconds=at - 1_700_000_000.0,
        shares={"generation": 0.83, "trainer": 0.46, "commit": 0.03, "publish": 0.02, "eval": 0.07},
    )  # fmt: skip


def fake_eval(version, reward, now, dice):
    yield e.EvalStarted(at_s=now(), policy_version=version, rollouts=6)
    for index in range(6):
        name = rollout_id(f"eval-{version:06d}-{index:02d}", 0)
        yield e.RolloutStarted(at_s=now(), rollout_id=name, group_id=name[:-3], task_id="held-out")
        yield e.RolloutScored(
            at_s=now(), rollout_id=name, group_id=name[:-3], reward=float(dice.random() < reward), stop="submitted",
            turns=2, sampled_tokens=60, score_s=0.02,
        )  # fmt: skip
    yield e.EvalFinished(
        at_s=now(), policy_version=version, reward_mean=reward, scored=6, failed=0, seconds=4.2, pass_at_1=reward
    )


def fake_step(step, groups, size, skill, now, dice):
    names = [group_id(step, index) for index in range(groups)]
    tasks = [TASKS[(step + index) % len(TASKS)] for index in range(groups)]
    opened = now()
    yield e.StepOpened(
        at_s=opened, step=step, policy_version=step - 1, group_ids=names, task_ids=tasks, group_size=size
    )
    rollouts = [(rollout_id(name, i), name, task) for name, task in zip(names, tasks, strict=True) for i in range(size)]
    rewards: dict[str, list[float]] = {name: [] for name in names}
    scripts = [fake_rollout(*each, skill, now, dice, rewards) for each in rollouts]
    waiting, live, done, queued, passes = scripts[:], [], [], [], 0
    while waiting or live or queued:
        while waiting and len(live) < 14:
            live.append(waiting.pop(0))
        if live:
            script = dice.choice(live[:9])
            event = next(script, None)
            if event is None:
                live.remove(script)
            else:
                yield event
                if isinstance(event, e.RolloutScored):
                    queued.append(event.rollout_id)
        if queued and (dice.random() < 0.2 or not live):
            passes += 1
            taken, queued = queued[:2], queued[2:]
            yield e.PassStarted(
                at_s=now(), worker=0, pass_id=step * 1000 + passes, rollout_ids=taken, tokens=612, queued=len(queued)
            )
            yield e.PassDone(at_s=now(), worker=0, pass_id=step * 1000 + passes, rollout_ids=taken, busy_s=0.3)
            done += taken
            for name in names:
                if len(rewards[name]) == size and all(each in done for each, group, _ in rollouts if group == name):
                    flat = len(set(rewards[name])) == 1
                    yield e.GroupClosed(at_s=now(), group_id=name, rewards=rewards.pop(name), flat=flat)
                    rewards[name] = []
        if dice.random() < 0.1:
            yield e.Gauges(
                at_s=now(), engine_busy=min(1.0, 0.7 + dice.random() * 0.3), trainer_busy=dice.uniform(0.3, 0.6),
                generate_running=min(9, len(live)), tools_running=max(0, len(live) - 9), queue_pieces=len(queued),
                open_slots=dice.randint(1, 4), loop_lag_ms=dice.random() * 3, tokens_per_s=dice.uniform(300, 520),
            )  # fmt: skip
    if step % 3 == 0:
        yield e.Warned(
            at_s=now(), text=f"step {step}: trainer idle 41 % of the time; more prompts_per_step would fill it"
        )
    yield e.WeightsPublished(at_s=now(), policy_version=step, publish_s=0.41)
    closed = now()
    metrics = {
        "reward_mean": min(1.0, max(0.0, skill + dice.gauss(0, 0.08))), "reward_std": 0.31, "step_s": closed - opened,
        "engine_busy": 0.84, "trainer_busy": 0.47, "queue_wait_s": 0.2, "tokens": 2841.0, "grad_norm": 0.87,
        "lr": 2e-5, "mismatch_mean": 0.0021, "mismatch_max": 0.041, "staleness": 0.0,
    }  # fmt: skip
    yield e.StepCommitted(at_s=closed, step=step, policy_version=step, empty=False, metrics=metrics)


def fake_rollout(name, group, task, skill, now, dice, rewards):
    yield e.RolloutStarted(at_s=now(), rollout_id=name, group_id=group, task_id=task)
    if dice.random() < 0.04:
        yield e.RolloutFailed(
            at_s=now(), rollout_id=name, group_id=group, failure="sandbox", detail="exit 137", will_retry=True
        )
        yield e.RolloutStarted(at_s=now(), rollout_id=name, group_id=group, task_id=task, attempt=2)
    turns = dice.randint(1, 5)
    for turn in range(turns):
        yield e.TurnStarted(at_s=now(), rollout_id=name, turn=turn)
        yield e.TurnGenerated(
            at_s=now(), rollout_id=name, turn=turn, sampled_tokens=28, prompt_tokens=310, cached_tokens=288,
            generate_s=0.7, finish_reason="stop",
        )  # fmt: skip
        yield e.ToolStarted(at_s=now(), rollout_id=name, turn=turn, command="ls -la")
        yield e.ToolFinished(at_s=now(), rollout_id=name, turn=turn, exit_code=0, tool_s=0.05)
    yield e.ScoringStarted(at_s=now(), rollout_id=name)
    reward = 1.0 if dice.random() < skill else dice.choice([0.0, 0.0, 0.5])
    rewards[group].append(reward)
    yield e.RolloutScored(
        at_s=now(), rollout_id=name, group_id=group, reward=reward, stop="submitted", turns=turns,
        sampled_tokens=28 * turns, score_s=0.03,
    )  # fmt: skip
