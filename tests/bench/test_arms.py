"""Each arm through the real step driver, stream, ledger and worker of a tiny model; only the engine is a fake."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.fakes import Asked, FakeGenerator, FakeTeacher, Reply
from tests.learn.replay import InProcessLink, setup
from tests.tiny import tiny_model
from thundersync.bench import chart, report
from thundersync.bench.arms import ArmDriver, Measured
from thundersync.bench.crew import Crew, engine_places
from thundersync.bench.pairs import engine_devices, pairs_of, traces
from thundersync.bench.processes import PeakMemory, Processes
from thundersync.bench.protocol import Bench, Measurements
from thundersync.bench.replay import Script
from thundersync.bench.results import Results, operations, results_of
from thundersync.bench.workload import Workload, drawn
from thundersync.config import BenchArm, BenchConfig, Config, EnvConfig, ModelConfig, TrainerConfig
from thundersync.config_file import config_from
from thundersync.core.ready_queue import PartRoom
from thundersync.learn.worker import Worker
from thundersync.monitor import events as e
from thundersync.placement import EnginePlace, place
from thundersync.plan.runs import rules
from thundersync.recipe import terms_of
from thundersync.rollout.runner import RolloutRunner
from thundersync.score.teacher import TeacherPool
from thundersync.score.turns import TurnScorer
from thundersync.step import StepDriver

LAST = "-01-02"
"""Of two groups of three: the last rollout of the last."""
ARMS: tuple[BenchArm, ...] = ("stream", "group", "lazy", "async")
SEED = 2
"""Of which both groups have rewards that differ."""
BENCH = BenchConfig(
    shared_tokens=20, prompt_tokens=4, reply_tokens=6, result_tokens=2, tool_s=0.02, tool_spread=1.0, score_s=0.0
)


class Rig:
    """One worker and one engine for all arms."""

    def __init__(
        self, folder: Path, *, distils: bool = False, bench: BenchConfig = BENCH, stream: dict[str, str] | None = None
    ) -> None:
        self.model = tiny_model(folder / "model")
        self.config: Config = config_from(
            {
                "model": {"name": str(self.model), "max_model_len": 256},
                "algo": {"group_size": 3, "prompts_per_step": 2},
                "rollout": {"max_tokens": 16},
                "env": {"path": "unused"},
                **({"algo": {"type": "opd", "group_size": 3, "prompts_per_step": 2}} if distils else {}),
                **({"teacher": {"name": "a fake"}} if distils else {}),
                "stream": stream or {},
            }
        )
        self.workload: Workload = drawn(bench, groups=2, size=3, seed=SEED)
        self.worker = Worker()
        ready = self.worker.answer(setup(self.model, folder / "weights", terms=terms_of(self.config)))
        link = InProcessLink(self.worker)
        link.pid = os.getpid()  # type: ignore[attr-defined]
        self.waits_for_a_pass = False
        """The last rollout's replies wait until a pass has begun: an arm that never begins before the end is stuck."""
        self._begun = asyncio.Event()
        self.generator = FakeGenerator(self.reply)
        self.asked: list[tuple[str, int]] = []
        """Rollout and publishes before it, of each request."""
        self.crew = Crew([self.generator], [link], arena=ready.arena)  # type: ignore[list-item, union-attr, arg-type]
        self.events: list[e.AnyEvent] = []
        self.script = Script(self.workload, vocabulary=250, seed=1)
        self.run = StepDriver(
            self.config,
            runner=RolloutRunner(
                agent=None,
                generators=[self.generator],
                on_failure="retry",
                max_attempts=1,
                emit=self.events.append,  # type: ignore[arg-type]
            ),
            generators=[self.generator],
            workers=self.crew.workers,
            shares_prompts=True,
            prompt_ids=self.script.prompt_ids,
            room=PartRoom(most=100),
            policy_version=0,
            emit=self.events.append,
            keep=None,  # type: ignore[arg-type]
            scorer=TurnScorer(TeacherPool([("*", FakeTeacher())]), topk=0) if distils else None,
        )

    def reply(self, asked: Asked) -> Reply:
        self.asked.append((asked.rollout_id, len(self.generator.published)))
        waits = self.waits_for_a_pass and asked.rollout_id.endswith(LAST)
        text = "x" * asked.sampling.max_tokens
        return Reply(text=text, finish_reason="length", before=self._begun.wait if waits else None)

    def hear(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.PassStarted):
            self._begun.set()

    def driver(self, arm: BenchArm) -> ArmDriver:
        self._begun.clear()
        self.waits_for_a_pass = arm in ("stream", "group")
        return ArmDriver(
            arm,
            self.config,
            crew=self.crew,
            run=self.run,
            script=self.script,
            emit=self.hear,
            keep=None,  # type: ignore[arg-type]
            processes=Processes([]),
        )


@pytest.fixture(scope="module")
async def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, dict[BenchArm, list[Measured]]]:
    rig = Rig(tmp_path_factory.mktemp("bench"))
    steps: dict[BenchArm, list[Measured]] = {arm: [] for arm in ARMS}
    version = 0
    for number in range(2):
        for arm in ARMS:
            driver = rig.driver(arm)
            await driver.take_over(version, rig.crew)
            steps[arm].append(await driver.step(number, memory=number == 0))
            version = driver.policy_version
    return rig, steps


async def test_distilled_turns_are_replayed_in_every_arm_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path, distils=True)
    version = 0
    arms: tuple[BenchArm, ...] = ("stream", "group", "lazy")
    for arm in arms:
        driver = rig.driver(arm)
        await driver.take_over(version, rig.crew)
        step = await driver.step(0)
        version = driver.policy_version
        assert step.metrics["empty"] == 0.0
        scored = max(event.at_s for event in step.events if isinstance(event, e.TurnScored))
        assert arm != "lazy" or begun(step) >= scored


async def test_a_step_that_releases_at_the_content_learns_while_its_checkers_run(tmp_path: Path) -> None:
    bench = msgspec.structs.replace(BENCH, tool_s=0.0, score_s=2.0)
    rig = Rig(tmp_path, bench=bench, stream={"release": "content"})
    assert rules(rig.config).holds
    version = 0
    for arm, waits in (("stream", False), ("group", True), ("lazy", True)):
        driver = rig.driver(arm)  # type: ignore[arg-type]
        rig.waits_for_a_pass = False
        await driver.take_over(version, rig.crew)
        step = await driver.step(0)
        version = driver.policy_version
        landed = min(event.at_s for event in step.events if isinstance(event, e.RolloutScored))
        assert (begun(step) > landed) == waits, arm


async def test_what_the_async_arm_generates_on_the_clock_was_not_prepared_off_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    driver = rig.driver("async")
    await driver.take_over(0, rig.crew)
    await driver.step(0)
    published = {rollout_id: [count for r, count in rig.asked if r == rollout_id] for rollout_id, _ in rig.asked}
    assert len(published) == 6
    for before, *_, after in published.values():
        assert after > before  # a publish empties the engines' caches


async def test_no_arm_is_measured_before_adams_moments_exist(tmp_path: Path) -> None:
    """Whichever comes first: without them its peak would be told 8 bytes a parameter too low."""
    rig = Rig(tmp_path)
    rig.config = msgspec.structs.replace(rig.config, bench=BenchConfig(arms=("stream", "lazy"), repeats=1))
    moments: list[bool] = []

    class Bench_(Bench):
        async def _hire(self, stack: object) -> None:
            self._drivers = {arm: driver(arm) for arm in ("stream", "lazy")}
            self._crew = rig.crew

    def driver(arm: BenchArm) -> ArmDriver:
        found = rig.driver(arm)
        rig.waits_for_a_pass = False
        reset = found._memory.reset

        def watched() -> None:
            moments.append(bool(rig.worker._optimizer.adamw.state))
            reset()

        found._memory.reset = watched  # type: ignore[method-assign]
        return found

    parts = SimpleNamespace(driver=SimpleNamespace(policy_version=0), gauges=SimpleNamespace(take_lag=lambda: 0.0))
    said: list[str] = []
    bench = Bench_(rig.config, parts, None, rig.workload, say=said.append)  # type: ignore[arg-type]
    found = await bench.run()
    assert moments == [True, True]
    assert set(found.peak_gib) == set(found.steps) == {"stream", "lazy"}


def test_an_arms_own_trace_has_the_workers_of_its_own_crew(measured: Measurement) -> None:
    rig, steps = measured
    of_two = msgspec.structs.replace(rules(rig.config), workers=2)
    assert {trace.workers for trace in traces(steps["lazy"], of_two).values()} == {1}


def test_a_device_of_the_forecast_is_as_large_as_a_trainer_worker() -> None:
    def devices(cores: int, workers: int) -> int:
        config = Config(model=ModelConfig(name="m"), env=EnvConfig(path="p"), trainer=TrainerConfig(workers=workers))
        return engine_devices(place(config, cores=range(cores), gpus=[], cpu_flags=set()), 1)

    assert [devices(2, 1), devices(4, 1), devices(4, 2), devices(8, 4)] == [1, 1, 2, 4]


def test_colocated_engines_are_as_large_as_the_runs_own_or_take_fewer_rollouts() -> None:
    config = Config(model=ModelConfig(name="m"), env=EnvConfig(path="p"))

    def places(own: list[int], more: list[int]) -> list[tuple[list[int], int]]:
        found = engine_places(config, EnginePlace(cpus=own), more)
        return [(place.cpus, fitted.engine.max_num_seqs) for fitted, place in found]

    assert places([0], [1]) == [([1], 32)]
    assert places([0, 1], [2, 3]) == [([2, 3], 32)]
    assert places([0, 1], [2, 3, 4]) == [([2, 3], 32), ([4], 16)]
    assert places([0, 1, 2], [3]) == [([3], 10)]


Measurement = tuple[Rig, dict[BenchArm, list[Measured]]]


def test_every_arm_does_the_same_work(measured: Measurement) -> None:
    rig, steps = measured
    expected = [sum(r.sampled_tokens for r in rig.workload.of_replay(number).rollouts) for number in range(2)]
    for arm, of_arm in steps.items():
        assert [step.metrics["tokens"] for step in of_arm] == expected, arm
        twice = 2 if arm == "async" else 1  # what it learned from, off the clock, and the next step's, on it
        assert [step.sampled_tokens for step in of_arm] == expected or twice == 2
        assert [step.metrics["empty"] for step in of_arm] == [0.0, 0.0]
        assert [step.metrics["staleness"] for step in of_arm] == [0.0, 0.0]
    trained = {arm: [step.metrics["tokens_trained"] for step in of_arm] for arm, of_arm in steps.items()}
    assert trained["group"] == trained["lazy"] == trained["async"]
    assert all(one >= other for one, other in zip(trained["stream"], trained["lazy"], strict=True))


def test_passes_begin_when_each_arm_says(measured: Measurement) -> None:
    _, steps = measured
    for step in steps["lazy"]:
        assert begun(step) > rewarded(step)
    for step in steps["async"]:
        assert begun(step) < rewarded(step)
    assert all(begun(step) < rewarded(step) for step in steps["stream"])
    for step in steps["group"]:
        group = next(event for event in step.events if isinstance(event, e.PassStarted)).rollout_ids[0][:-3]
        landed = [ev.at_s for ev in step.events if isinstance(ev, e.RolloutScored) and ev.group_id == group]
        assert begun(step) >= max(landed)


def begun(step: Measured) -> float:
    return min(event.at_s for event in step.events if isinstance(event, e.PassStarted))


def rewarded(step: Measured) -> float:
    return max(event.at_s for event in step.events if isinstance(event, e.RolloutScored))


def test_a_timeline_lies_within_its_step(measured: Measurement) -> None:
    for of_arm in measured[1].values():
        for step in of_arm:
            line = step.timeline
            assert 0.0 < line.first_prompt_s < line.generated_s < line.step_s
            assert line.learned_s < line.step_s
            assert 0.0 < line.learning_s < line.step_s
            assert 0.0 < step.restart_s < line.step_s


def test_results_tell_speed_ups_and_forecasts_under_stable_names(measured: Measurement, tmp_path: Path) -> None:
    rig, steps = measured
    found = results(rig, steps)
    report.write_json(found, tmp_path / "bench.json")
    read = msgspec.json.decode((tmp_path / "bench.json").read_bytes())
    assert set(read["speedup"]) == {"stream_over_lazy", "group_over_lazy", "async_over_lazy"}
    assert {"stream_error", "stream_own_error", "group_error", "speedup_error"} <= set(read["forecast"])
    assert "async_error" not in read["forecast"]
    assert read["arms"]["stream"]["step_s"]["values"] == [step.step_s for step in steps["stream"]]
    pair = next(each for each in found.pairs if each.arm == "stream")
    assert pair.speedup == steps["lazy"][0].step_s / steps["stream"][0].step_s
    assert pair.forecast_s is not None
    assert pair.error == pytest.approx(pair.step_s / pair.forecast_s - 1.0)


def results(rig: Rig, steps: dict[BenchArm, list[Measured]]) -> Results:
    return results_of(
        Measurements(steps=steps, lag_s=dict.fromkeys(steps, 0.0), peak_gib=dict.fromkeys(steps, 1.0)),
        pairs_of(steps, rules(rig.config)),
        rig.workload,
        name="bench-test",
        model="tiny",
        parameters=1000,
        machine="a test",
        placement="in one process",
        distils=False,
    )


def test_the_picture_has_every_arm_and_every_pass(measured: Measurement) -> None:
    rig, steps = measured
    drawn_picture = chart.draw(results(rig, steps), steps)
    for arm in ARMS:
        assert f">{arm}: " in drawn_picture
    most = max(len(spans) for step in steps["stream"] for spans in step.timeline.passes)
    assert drawn_picture.count(chart.LEARNS) >= min(most, 1) * len(ARMS)


def test_useful_work_counts_each_prompt_once_and_no_flat_group() -> None:
    workload = drawn(BENCH, groups=2, size=3, seed=SEED)
    (step,) = workload.steps
    own = sum(rollout.own_tokens for rollout in step.rollouts)
    both = operations(with_rewards(step, [0.0, 1.0, 1.0]), 20, 10)
    assert both == 10 * (2 * (20 + 4 + 4 + own) + 6 * (20 + 4 + 4 + own))
    flat = operations(with_rewards(step, [1.0, 1.0, 1.0]), 20, 10)
    assert flat == 10 * (2 * (20 + 4 + 4 + own) + 6 * 20)


def with_rewards(step: object, rewards: list[float]) -> object:
    groups = [
        msgspec.structs.replace(
            group,
            rollouts=[
                msgspec.structs.replace(rollout, reward=reward)
                for rollout, reward in zip(group.rollouts, rewards, strict=True)
            ],
        )
        for group in step.groups  # type: ignore[attr-defined]
    ]
    return msgspec.structs.replace(step, groups=groups)  # type: ignore[type-var]


def test_a_peak_of_memory_is_forgotten_by_a_reset() -> None:
    memory = PeakMemory([os.getpid()])
    block = bytearray(b"x") * (64 << 20)
    high = memory.gib()
    del block
    memory.reset()
    assert memory.gib() < high - 0.04
