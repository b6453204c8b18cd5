"""The three agents over real boxes, their replies scripted: a shell, a repair's shell, a terminal."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandboxes import ProcessRuntime, Runtime
from tests.boxes import process_runtime
from tests.fakes import ByteTokenizer, FakeGenerator, FakeRuntime, Feed, a_task, done, turns
from tests.rollout.test_real_sandbox import bash, checked_by
from tests.tasks.repairs import a_row
from thundersync.config import RolloutConfig
from thundersync.core.types import Checker, Rollout, Scored, Task
from thundersync.errors import ConfigError
from thundersync.rollout.agent import ShellAgent
from thundersync.rollout.dialogue import Renderer
from thundersync.rollout.hands import SUBMISSION, RepairHands, ShellHands
from thundersync.rollout.manners import Manners
from thundersync.rollout.protocol import Action, NoAction
from thundersync.rollout.terminal_hands import TerminalAction, TerminalHands
from thundersync.score.reward import RewardChecker
from thundersync.tasks.kept import KeptFiles
from thundersync.tasks.swe import smith_task

SUBMIT = bash(f"echo {SUBMISSION}")
FIX = bash("sed -i 's/a - b/a + b/' calc.py")


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[ProcessRuntime]:
    runtime = await process_runtime()
    yield runtime
    await runtime.close()


def repair_in(folder: Path) -> Task:
    found = smith_task(a_row(folder), suite="s", keep=KeptFiles(folder / "kept"), near=folder)
    assert found.task is not None, found.faults
    return found.task


async def roll(
    runtime: Runtime | FakeRuntime, task: Task, *replies: str, feed: Feed | None = None, **config: Any
) -> Rollout:
    rollout = RolloutConfig(**config)
    agent = ShellAgent(
        renderer=Renderer(ByteTokenizer()),
        runtime=runtime,  # type: ignore[arg-type]  # the fake has no snapshots, and nothing here asks for one
        checker=RewardChecker(runtime=runtime),  # type: ignore[arg-type]
        config=rollout,
        prompt=Manners(rollout),
        emit=feed if feed is not None else Feed(),
    )
    return await agent.run(
        task, rollout_id="r", group_id="g", generator=FakeGenerator(turns(*replies)), policy_version=0
    )


def scored(rollout: Rollout) -> tuple[float, str]:
    assert isinstance(rollout.outcome, Scored), rollout.outcome
    return rollout.outcome.reward, rollout.outcome.stop


async def test_a_repair_is_submitted_by_a_command_and_its_change_is_what_is_judged(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    task = repair_in(tmp_path)
    rollout = await roll(runtime, task, "```mswea_bash_command\ncat calc.py\n```", FIX, SUBMIT)
    assert scored(rollout) == (1.0, "submitted")
    assert isinstance(rollout.outcome, Scored) and "+    return a + b" in rollout.outcome.change
    assert rollout.messages[0].content.startswith("You repair a Python repository.")
    first = rollout.turns[0].output
    assert first.startswith("<returncode>0</returncode>\n<output>\ndef add(a, b):\n    return a - b\n")
    assert len(rollout.sequences) == 1


@pytest.mark.parametrize(
    ("replies", "reward", "stop"),
    [
        ([SUBMIT], 0.0, "submitted"),
        ([FIX], 1.0, "max_turns"),
        ([bash(f"echo not yet; echo {SUBMISSION}"), FIX], 1.0, "max_turns"),
        ([bash(f"echo {SUBMISSION}; exit 3"), FIX], 1.0, "max_turns"),
        (["no block", "again none"], 0.0, "no_action"),
    ],
)
async def test_a_repair_that_was_not_submitted_is_judged_as_it_is(
    runtime: ProcessRuntime, tmp_path_factory: pytest.TempPathFactory, replies: list[str], reward: float, stop: str
) -> None:
    task = repair_in(tmp_path_factory.getbasetemp() / "hands-repair")
    assert scored(await roll(runtime, task, *replies, max_turns=len(replies))) == (reward, stop)


async def test_a_terminal_is_typed_into_and_its_screen_is_told(runtime: ProcessRuntime, tmp_path: Path) -> None:
    check = 'mkdir -p /logs/verifier; [ "$(cat sum.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt'
    task = checked_by(tmp_path, f"{check} || echo 0 > /logs/verifier/reward.txt")
    feed = Feed()
    rollout = await roll(
        runtime,
        task,
        # A wait ends when the shell is back, however long its program takes.
        '{"plan": "ask python", "commands": [{"keystrokes": "python3 -q\\n", "duration": 0.2},'
        ' {"keystrokes": "open(\'sum.txt\', \'w\').write(str(6 * 7)); exit()\\n", "duration": 60}]}',
        '```json\n{"commands": [{"keystrokes": "cat sum.txt"}, {"keystrokes": "C-a"}, {"keystrokes": "echo; "},'
        ' {"keystrokes": "Enter", "duration": 60}]}\n```',
        '{"commands": [], "task_complete": true}',
        '{"commands": [], "task_complete": true}',
        feed=feed,
        agent="terminal",
    )
    assert scored(rollout) == (1.0, "submitted")
    assert rollout.turns[1].command == "cat sum.txtC-aecho; Enter"
    assert [turn.exit_code for turn in rollout.turns] == [None] * 4
    assert "exit()" in rollout.turns[0].output
    shown = rollout.turns[1].output.splitlines()
    assert (shown[0].endswith("$ echo; cat sum.txt"), shown[1:3]) == (True, ["", "42bash-5.2$"])
    assert "task_complete" in rollout.messages[-2].content
    assert len(rollout.sequences) == 1, "what was told is appended, never rewritten"
    assert feed.kinds.count("tool_finished") == 2


async def test_a_screen_that_was_drawn_over_is_told_as_it_is(runtime: ProcessRuntime, tmp_path: Path) -> None:
    task = checked_by(tmp_path, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    rollout = await roll(
        runtime,
        task,
        '{"commands": [{"keystrokes": "seq 3\\n", "duration": 60}]}',
        '{"commands": [{"keystrokes": "clear; echo only this\\n", "duration": 60}]}',
        '{"commands": [{"keystrokes": "echo more\\n", "duration": 60}], "task_complete": true}',
        agent="terminal",
        max_turns=3,
    )
    first, second, third = (turn.output.splitlines() for turn in rollout.turns)
    assert (first[0].endswith("$ seq 3"), first[1:4]) == (True, ["1", "2", "3"])
    assert second[0] == "only this"
    assert (third[0].endswith("$ echo more"), third[1]) == (True, "more")


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("I think", "held no JSON object"),
        ('{"commands": [}', "held JSON that cannot be read"),
        ('{"commands": "ls"}', "held JSON that cannot be read"),
        pytest.param('{"commands": ' + "[" * 5000, "held JSON that cannot be read", id="brackets without end"),
        ('{"commands": [{"keystrokes": "\\ud800"}]}', "held JSON that cannot be read"),
        ('{"plan": "wait"}', "held no commands"),
        ('{"commands": [], "task_complete": false}', "held no commands"),
    ],
)
def test_replies_that_press_no_keys_are_told_why(reply: str, found: str) -> None:
    why = TerminalHands(None, limit_chars=100).read(reply)  # type: ignore[arg-type]  # nothing is pressed
    assert isinstance(why, NoAction) and why.reason.startswith(found)


def test_keys_are_read_with_line_breaks_as_small_models_write_them() -> None:
    hands = TerminalHands(None, limit_chars=100)  # type: ignore[arg-type]
    action = hands.read('Sure: {"commands": [{"keystrokes": "ls\n"}], "task_complete": true} done')
    assert isinstance(action, TerminalAction)
    assert (action.command, action.submit, action.keys[0].duration) == ("ls\n", True, 1.0)


async def test_the_hands_of_a_shell_say_what_a_repairs_hands_say_otherwise() -> None:
    runtime = FakeRuntime(shell=lambda sandbox, command: done(b"x" * 30, exit_code=2, timed_out=True))
    sandbox = await runtime.start(None)  # type: ignore[arg-type]  # a fake needs no spec
    shell = await ShellHands(sandbox, tools=False, limit_chars=10).act(Action(command="a"), limit_s=1.0)
    repair = await RepairHands(sandbox, tools=False, limit_chars=10).act(Action(command="a"), limit_s=1.0)
    cut = "xxxxx\n[... 20 characters cut ...]\nxxxxx"
    assert shell.message.content == f"[stopped after 1 s]\n{cut}"
    assert repair.message.content == f"[stopped after 1 s]\n<returncode>2</returncode>\n<output>\n{cut}\n</output>"


def test_each_task_has_the_agent_of_its_kind_unless_one_is_named(tmp_path: Path) -> None:
    repair = a_task(checker=Checker(tests="x", verdict="repair"))
    auto, named = Manners(RolloutConfig()), Manners(RolloutConfig(agent="terminal"))
    assert [auto.name(repair), auto.name(a_task()), named.name(repair)] == ["repair", "shell", "terminal"]
    assert auto.tools and not named.tools
    assert auto.opening(repair)[0] != auto.opening(a_task())[0]


def test_prompts_are_replaced_by_a_file_for_all_or_by_a_folder_for_some(tmp_path: Path) -> None:
    (tmp_path / "repair.md").write_text("Mend it.\n")
    repair = a_task(checker=Checker(tests="x", verdict="repair"))
    folder = Manners(RolloutConfig(system_prompt=str(tmp_path)))
    assert folder.opening(repair)[0].content == "Mend it."
    assert folder.opening(a_task()) == Manners(RolloutConfig()).opening(a_task())
    file = Manners(RolloutConfig(system_prompt=str(tmp_path / "repair.md")))
    assert file.opening(a_task())[0].content == "Mend it."
    with pytest.raises(ConfigError, match="no prompt"):
        Manners(RolloutConfig(system_prompt=str(tmp_path / "none")))


def test_every_shipped_prompt_shows_replies_that_its_own_agent_understands() -> None:
    task = a_task()
    for name in ("shell", "repair", "terminal"):
        manners = Manners(RolloutConfig(agent=name))
        hands = manners.hands(task, None, tools=False)  # type: ignore[arg-type]  # nothing is run
        replies = [each.content for each in manners.opening(task) if each.role == "assistant"]
        actions = [hands.read(reply) for reply in replies]
        assert replies and all(isinstance(action, Action) for action in actions)
        last = msgspec.structs.asdict(actions[-1])
        assert last["submit"] or last["command"] == f"echo {SUBMISSION}"
