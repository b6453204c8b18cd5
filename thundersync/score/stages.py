"""Tasks in stages (Harbor's multi-step tasks): one sandbox, worked on and judged several times over.

Between whoever acts (an agent, a reference solution, nobody) and the checker: `in_stages` makes each stage ready, lets
act, judges, and goes on while the stage was good enough. A task without stages is its own only one. (The format says
`steps`; here a step is what lies between two commits.) Knows nothing of turns.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from sandboxes.base import Command, Sandbox
from thundersync.core.types import HealthCheck, Stage, Task
from thundersync.score.reward import CheckFailed, RewardChecker, Verdict, training_reward

SETUP = "setup.sh"
"""A name reserved by the format: of what a stage brings, it runs before the agent does."""
SETUP_LIMIT_S = 600.0

# What lies in the agent's folder is the agent's, whoever that is there, and to be changed. A link itself is given, not
# what it leads to, which may not be there yet. Busybox knows no `chown --reference`. A folder that is root's may hold
# the whole image, and nothing in it changes hands: what was put below a folder of the agent's is the agent's already.
_OWNER = """
owner=$(stat -c %u:%g .)
[ "${owner%%:*}" -ne 0 ] || exit 0
"""
_GIVE = f"""{_OWNER}
while IFS= read -r -d '' name; do
  find "./$name" -exec chown -h "$owner" {{}} + && find "./$name" ! -type l -exec chmod u+rwX {{}} + || exit 1
done
"""
# As root, as the image itself was made: it may install things.
_SET_UP = f"""
bash ./{SETUP} || exit
{_OWNER}
find . -xdev -user 0 -exec chown -h "$owner" {{}} +
"""


def stages_of(task: Task) -> list[Task]:
    """Each stage as a task of its own, over the same sandbox."""
    return [
        msgspec.structs.replace(
            task,
            instruction=stage.instruction,
            checker=stage.checker,
            solution=stage.solution,
            agent_timeout_s=stage.agent_timeout_s,
            stages=[stage],
        )
        for stage in task.stages
    ] or [task]


async def in_stages(
    sandbox: Sandbox,
    task: Task,
    *,
    act: Callable[[Task, bool], Awaitable[None]],
    judge: Callable[[Task], Awaitable[Verdict]],
    checker: RewardChecker,
) -> Verdict:
    """Every stage in its order, until one is not good enough for the next. The verdict is of the whole task.

    `act` works on a stage, and is told whether it can be the last; `judge` says what the stage is worth then.
    Raises: CheckFailed, SandboxError, and what the two raise.
    """
    if not task.stages:
        await act(task, True)
        return await judge(task)
    verdicts: list[Verdict] = []
    for number, stage_task in enumerate(stages_of(task)):
        stage = stage_task.stages[0]
        last = number + 1 == len(task.stages)
        try:
            await _enter(sandbox, stage_task, stage)
        except _Unhealthy as unhealthy:
            if not verdicts:
                raise CheckFailed("checker", str(unhealthy)) from unhealthy
            # What the agent left behind is not what the stage begins with: that is a result, and its own doing.
            verdicts.append(Verdict(reward=0.0, rewards={"reward": 0.0}))
            break
        await act(stage_task, last)
        verdicts.append(await judge(msgspec.structs.replace(stage_task, stages=[])))
        if last or not good_enough(stage, verdicts[-1]):
            break
        await checker.clear(sandbox)
    return joined(verdicts, last_only=task.stage_rewards == "final")


def good_enough(stage: Stage, verdict: Verdict) -> bool:
    """Whether the next stage is worth trying."""
    if isinstance(stage.min_reward, dict):
        return all(verdict.rewards.get(name, 0.0) >= least for name, least in stage.min_reward.items())
    return stage.min_reward is None or verdict.reward >= stage.min_reward


def joined(verdicts: Sequence[Verdict], *, last_only: bool) -> Verdict:
    """Of all stages that were judged: the mean of each reward (0 where a stage has it not), or the last one's."""
    if last_only:
        return verdicts[-1]
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.rewards)
    rewards = {
        name: math.fsum(verdict.rewards.get(name, 0.0) for verdict in verdicts) / len(verdicts) for name in names
    }
    return Verdict(reward=training_reward(rewards), rewards=rewards)


class _Unhealthy(Exception):
    """A stage's health check has failed too often."""


async def _enter(sandbox: Sandbox, task: Task, stage: Stage) -> None:
    """Bring what the stage brings, set it up, and look whether all is as it has to be."""
    if stage.files:
        folder = Path(stage.files)
        names = await asyncio.to_thread(lambda: [path.name for path in folder.iterdir()])
        await sandbox.put_tree(folder, task.workdir)
        given = b"".join(name.encode() + b"\0" for name in names)
        await _must(sandbox, task, Command(script=_GIVE, stdin=given, user="root"), "what it brings cannot be given")
        if SETUP in names:
            setup = Command(script=_SET_UP, timeout_s=SETUP_LIMIT_S, user="root")
            await _must(sandbox, task, setup, f"its {SETUP} failed")
    if stage.healthcheck is not None:
        await _until_healthy(sandbox, stage, stage.healthcheck)


async def _must(sandbox: Sandbox, task: Task, command: Command, what: str) -> None:
    result = await sandbox.run(command)
    if result.exit_code != 0 or result.timed_out:
        said = (result.stdout + result.stderr).decode(errors="replace").strip()[-300:]
        name = task.stages[0].name
        raise CheckFailed("checker", f"stage {name} of {task.task_id} could not be entered: {what}; {said!r}")


async def _until_healthy(sandbox: Sandbox, stage: Stage, check: HealthCheck) -> None:
    """As Docker polls: failures within the start period do not count, `retries` in a row after it are the end."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    failures = 0
    while True:
        result = await sandbox.run(Command(script=check.command, timeout_s=check.timeout_s, keeps_running=True))
        if result.exit_code == 0 and not result.timed_out:
            return
        starting = loop.time() - began_s < check.start_period_s
        failures += not starting
        if failures >= check.retries:
            raise _Unhealthy(f"the health check of stage {stage.name} failed {failures} times: {check.command}")
        await asyncio.sleep(check.start_interval_s if starting else check.interval_s)
