"""verifiers environments become tasks and an agent: the policy's tokens are captured, their rubric gives the reward.

Over a package that has the place and form of verifiers, and, where it is installed, over the real one.
"""

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ByteTokenizer, FakeGenerator, FakeRuntime, Feed, Reply, turns
from thundersync.config import Config, RolloutConfig
from thundersync.config_file import config_from
from thundersync.core.types import Failed, Rollout, Scored
from thundersync.environments import with_environments as with_them
from thundersync.errors import EngineFailed, TaskError
from thundersync.own import Own
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.functions import FunctionAgent
from thundersync.score.judge import CheckerJudge
from thundersync.score.reward import RewardChecker
from thundersync.tasks.load import load_env

pytest.importorskip("openai", reason="VERIFIERS ENVIRONMENTS ARE NOT TESTED: openai is missing")
PACKAGE = """
__version__ = "0.1.10"


def load_environment(name, **args):
    if name != "sums":
        raise ImportError(f"no module named {name}")
    return Environment(**args)


class Rubric:
    def __init__(self, reward, groups):
        self.reward, self.groups = reward, groups

    def _get_group_reward_funcs(self):
        return self.groups

    async def score_rollout(self, state):
        right = any(state["answer"] in said for said in state["said"])
        state["reward"] = float(right) if self.reward is None else self.reward
        state["metrics"] = {"right": float(right), "words": None, "bad": float("nan")}


class Environment:
    def __init__(self, asks=2, tools=(), reward=None, groups=(), swallows=True, stop=None):
        self.asks, self.oai_tools, self.swallows, self.stop = asks, list(tools), swallows, stop
        self.rubric = Rubric(reward, list(groups))

    def get_dataset(self):
        rule = {"role": "system", "content": "Be brief."}
        return [
            {"prompt": [rule, {"role": "user", "content": f"{n} + {n}?"}], "answer": str(2 * n), "example_id": n}
            for n in (1, 2)
        ]

    get_eval_dataset = get_dataset

    async def rollout(self, row, client, model, settings):
        state = {**row, "said": [], "error": None}
        messages = list(row["prompt"])
        for number in range(self.asks):
            try:
                reply = await client.chat.completions.create(
                    model=model, messages=messages, max_completion_tokens=40, stop=self.stop
                )
            except Exception as error:
                if not self.swallows:
                    raise
                state["error"] = RuntimeError(f"ModelError: {error}")
                return state
            said = reply.choices[0].message.content
            state["said"].append(said)
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": [{"type": "text", "text": "Sure"}, {"type": "text", "text": "?"}]},
            ]
        return state
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the place of verifiers, and of none of its later parts."""
    file = tmp_path / "verifiers" / "__init__.py"
    file.parent.mkdir()
    file.write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = [name for name in sys.modules if name.split(".")[0] == "verifiers"]
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    yield file
    for name in [name for name in sys.modules if name.split(".")[0] == "verifiers"]:
        del sys.modules[name]


async def with_environments(own: Own, config: Config) -> Own:
    async with AsyncExitStack() as stack:
        return await with_them(own, config, stack)


def a_config(path: str = "sums", *, evaluated: bool = False, **args: Any) -> Config:
    env = {"type": "verifiers", "path": path, "args": args}
    raw: dict[str, Any] = {"model": {"name": "m"}, "env": env, "sandbox": {"runtime": "none"}}
    return config_from(raw | ({"eval": {"env": env}} if evaluated else {}))


async def roll(own: Own, generator: FakeGenerator, *, index: int = 0, **config: Any) -> Rollout:
    runtime = FakeRuntime()
    checker = RewardChecker()
    assert own.agent is not None
    agent = FunctionAgent(
        own.agent,
        renderer=Renderer(ByteTokenizer()),
        runtime=runtime,  # type: ignore[arg-type]  # never used: environments bring their own worlds
        checker=checker,
        judge=CheckerJudge(checker),
        config=RolloutConfig(**config),
        prompt=[],
        emit=Feed(),
    )
    task = list(own.tasks)[index]  # type: ignore[call-overload]  # a list, as environments give it
    rollout = await agent.run(task, rollout_id="r", group_id="g", generator=generator, policy_version=0)
    assert not runtime.sandboxes
    return rollout


async def test_an_environment_is_talked_to_and_its_rubric_gives_the_reward(package: Path) -> None:
    own = await with_environments(Own(), a_config())
    assert [task.task_id for task in own.tasks] == ["sums/train-000000", "sums/train-000001"]  # type: ignore[union-attr]
    rollout = await roll(own, FakeGenerator(turns("I say 2", "yes")))
    assert rollout.outcome == Scored(reward=1.0, rewards={"right": 1.0, "reward": 1.0}, stop="submitted")
    assert [message.content for message in rollout.messages] == ["Be brief.", "1 + 1?", "I say 2", "Sure?", "yes"]
    assert len(rollout.sequences) == 1 and len(rollout.turns) == 2
    assert rollout.sampled_tokens == len("I say 2") + len("yes") + 2
    wrong = await roll(own, FakeGenerator(turns("I say 2", "yes")), index=1)
    assert isinstance(wrong.outcome, Scored) and wrong.outcome.reward == 0.0


async def test_a_limit_ends_the_rollout_and_what_was_said_until_then_is_judged(package: Path) -> None:
    own = await with_environments(Own(), a_config())
    rollout = await roll(own, FakeGenerator(turns("2", "yes")), max_turns=1)
    assert isinstance(rollout.outcome, Scored)
    assert (rollout.outcome.reward, rollout.outcome.stop) == (1.0, "max_turns")


async def test_what_breaks_is_a_failed_rollout_though_the_environment_wraps_it(package: Path) -> None:
    def dies() -> None:
        raise EngineFailed("the engine is gone")

    own = await with_environments(Own(), a_config())
    engine = await roll(own, FakeGenerator(turns("2", Reply(text="yes", before=dies))))
    assert isinstance(engine.outcome, Failed) and engine.outcome.reason == "engine"
    for reward in ("much", float("inf")):
        odd = await with_environments(Own(), a_config(reward=reward))
        rollout = await roll(odd, FakeGenerator(turns("2", "yes")))
        assert isinstance(rollout.outcome, Failed) and "its rubric gave" in rollout.outcome.detail


@pytest.mark.parametrize(
    ("path", "args", "told"),
    [
        ("lost", {}, "the environment lost cannot be loaded: ImportError: no module named lost"),
        ("sums", {"x": 1}, "cannot be loaded: TypeError"),
        ("sums", {"tools": ["calculator"]}, "declares tools"),
        ("sums", {"groups": ["best"]}, "rewards whole groups at once"),
    ],
)
async def test_what_cannot_be_used_is_told_before_anything_starts(
    package: Path, path: str, args: dict[str, Any], told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        await with_environments(Own(), a_config(path, **args))


async def test_a_missing_package_and_another_interface_are_named(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.write_text('__version__ = "0.4.0"\n')
    with pytest.raises(TaskError, match=r"verifiers 0.4.0 has no load_environment") as caught:
        await with_environments(Own(), a_config())
    assert caught.value.remedy == "pip install 'verifiers<0.4'"
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(TaskError, match="needs the package verifiers") as caught:
        await with_environments(Own(), a_config())
    assert caught.value.remedy == "pip install verifiers"


async def test_an_environment_stands_alone(package: Path) -> None:
    plain = config_from({"model": {"name": "m"}, "env": {"path": "p"}})
    assert await with_environments(Own(), plain) == Own()
    both = await with_environments(Own(), a_config(evaluated=True))
    assert both.eval_tasks is not None and both.eval_tasks[0].task_id == "sums/eval-000000"

    async def agent(task: Any, policy: Any, sandbox: Any) -> None:
        pass

    with pytest.raises(TaskError, match="brings its own agent"):
        await with_environments(Own(agent=agent), a_config())
    with pytest.raises(TaskError, match="there are no tasks without it"):
        load_env(a_config().env)


REAL = importlib.util.find_spec("verifiers") is not None


@pytest.mark.skipif(not REAL, reason="THE REAL verifiers PACKAGE IS NOT TESTED: pip install 'verifiers<0.4'")
async def test_environments_of_the_real_package_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "two_asks.py").write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n\n\n"
        "class Twice(vf.MultiTurnEnv):\n"
        "    async def env_response(self, messages, state, **kwargs):\n"
        "        return [{'role': 'user', 'content': 'Sure?'}]\n\n\n"
        "def right(completion, answer, **kwargs):\n"
        "    return 1.0 if answer in completion[-1]['content'] else 0.25\n\n\n"
        "def load_environment(turns=2):\n"
        "    rows = Dataset.from_list([{'question': '1 + 1?', 'answer': '2'}, {'question': '2 + 2?', 'answer': '4'}])\n"
        "    kind = vf.SingleTurnEnv if turns == 1 else Twice\n"
        "    more = {} if turns == 1 else {'max_turns': turns}\n"
        "    return kind(dataset=rows, system_prompt='Be brief.', rubric=vf.Rubric(funcs=[right]), **more)\n"
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGINT)
    own = await with_environments(Own(), a_config("two-asks"))
    assert signal.getsignal(signal.SIGINT) is before
    rollout = await roll(own, FakeGenerator(turns("I think 2", "still 2")))
    assert isinstance(rollout.outcome, Scored), rollout.outcome
    assert (rollout.outcome.reward, rollout.outcome.rewards["right"]) == (1.0, 1.0)
    assert [message.content for message in rollout.messages] == ["Be brief.", "1 + 1?", "I think 2", "Sure?", "still 2"]
    assert len(rollout.sequences) == 1
    limited = await roll(own, FakeGenerator(turns("no", "still 2")), max_turns=1)
    assert isinstance(limited.outcome, Scored) and limited.outcome.stop == "max_turns"
    single = await with_environments(Own(), a_config("two-asks", turns=1))
    wrong = await roll(single, FakeGenerator(turns("5")), index=1)
    assert isinstance(wrong.outcome, Scored) and wrong.outcome.reward == 0.25
