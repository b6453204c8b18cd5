"""A simulated run as its feed would tell it: what `recorded` reads back."""

from collections.abc import Iterator, Sequence

from thundersync.forecast import Arm, StepForecast, StepTrace, simulate
from thundersync.monitor import events as e

PROMPT = 3


def run_of(steps: Sequence[StepTrace], arm: Arm = "stream", *, on_gpus: bool = False) -> list[e.AnyEvent]:
    """Each step opens when the one before it has committed, at whole hours."""
    first = steps[0]
    events: list[e.AnyEvent] = [
        e.RunStarted(
            at_s=0.0,
            name="told",
            run_dir="",
            pid=1,
            model="m",
            backend="vllm",
            runtime="process",
            algo="grpo",
            mode=arm,
            max_steps=len(steps),
            start_step=0,
            prompts_per_step=2,
            group_size=2,
            seed=0,
            engine_devices=first.engines,
            trainer_devices=first.workers,
            trainer_workers=first.workers,
            on_gpus=on_gpus,
        )
    ]
    for index, trace in enumerate(steps):
        events += sorted(_step(trace, simulate(trace, arm), index, 3600.0 * (index + 1)), key=lambda each: each.at_s)
    return events


def _step(trace: StepTrace, forecast: StepForecast, step: int, began_s: float) -> Iterator[e.AnyEvent]:
    groups = trace.groups()
    size = len(next(iter(groups.values())))
    yield e.StepOpened(
        at_s=began_s, step=step, policy_version=step, group_ids=list(groups), task_ids=list(groups), group_size=size
    )
    for rollout in trace.rollouts:
        name, group, at_s = rollout.rollout_id, rollout.group_id, began_s + rollout.release_s
        yield e.RolloutStarted(at_s=began_s, rollout_id=name, group_id=group, task_id=group)
        yield e.TurnGenerated(
            at_s=began_s + rollout.generate_s,
            rollout_id=name,
            turn=0,
            sampled_tokens=rollout.tokens,
            prompt_tokens=PROMPT,
            cached_tokens=0,
            generate_s=rollout.generate_s,
            finish_reason="stop",
        )
        if rollout.reward is None:
            yield e.RolloutFailed(
                at_s=at_s, rollout_id=name, group_id=group, failure="sandbox", detail="", will_retry=False
            )
        else:
            yield e.RolloutScored(
                at_s=at_s,
                rollout_id=name,
                group_id=group,
                reward=rollout.reward,
                stop="submitted",
                turns=1,
                sampled_tokens=rollout.tokens,
                score_s=0.0,
            )
    for number, interval in enumerate(forecast.intervals):
        if interval.what == "pass":
            ids, took_s = interval.rollout_ids, interval.end_s - interval.start_s
            yield e.PassStarted(
                at_s=began_s + interval.start_s,
                worker=interval.worker,
                pass_id=number,
                rollout_ids=ids,
                tokens=sum(r.tokens + PROMPT for r in trace.rollouts if r.rollout_id in ids),
                queued=0,
            )
            yield e.PassDone(
                at_s=began_s + interval.end_s, worker=interval.worker, pass_id=number, rollout_ids=ids, busy_s=took_s
            )
    metrics = {
        "step_s": forecast.step_s,
        "between_s": trace.after_s,
        "commit_s": trace.commit_s,
        "publish_s": trace.publish_s,
        "trainer_busy": forecast.trainer_busy,
    }
    yield e.StepCommitted(
        at_s=began_s + forecast.step_s, step=step, policy_version=step + 1, empty=False, metrics=metrics
    )
