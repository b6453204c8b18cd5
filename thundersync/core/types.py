"""The nouns of a run: task, turn, rollout, group, outcome. Plain values, no behaviour that needs a library.

Everything here is a frozen msgspec struct, so that it crosses a socket, lands in a file and compares by value.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

TaskId: TypeAlias = str
GroupId: TypeAlias = str
RolloutId: TypeAlias = str
StreamMode: TypeAlias = Literal["stream", "group", "lazy"]
"""What a piece waits for before it may be worked: its own reward or score, its whole group, or the whole step."""


def group_id(step: int, index: int) -> GroupId:
    """The name of a step's group, e.g. `000012-03`."""
    return f"{step:06d}-{index:02d}"


def rollout_id(group: GroupId, index: int) -> RolloutId:
    """The name of a group's rollout, e.g. `000012-03-05`."""
    return f"{group}-{index:02d}"


class Image(Struct, frozen=True, kw_only=True):
    """Where a sandbox's file tree comes from: a Dockerfile in `context`, or a prebuilt image by `name`."""

    name: str = ""
    context: str = ""
    """Absolute folder that holds `Dockerfile`; empty when only a name is given."""


VerdictKind: TypeAlias = Literal["reward_file", "test_summary", "swebench_results", "repair"]
"""Where a verdict is read: the reward file that the checker writes; the test summary, or the word between two marks,
that it prints (Terminal-Bench 1); or, for repairs, the log of the tests run on the change in a fresh sandbox."""

Shaping: TypeAlias = Literal["task", "binary", "pass_ratio", "pass_ratio_with_bonus"]
"""What trains: the task's own reward; all tests pass; the (weighted) share that passes; that and 1 more for all."""


class Checker(Struct, frozen=True, kw_only=True):
    """How a task is judged: `tests` is copied to /tests after the agent has ended, then `command` runs there."""

    tests: str = ""
    """Absolute folder on the host; never visible to the agent. Of a repair: the folder with its `repair.json`. Empty
    where a reward function judges."""
    shared: str = ""
    """Absolute folder that is copied to /tests before them: what several stages have in common."""
    script: str = ""
    """Absolute path of a file that is copied beside them."""
    command: str = "bash /tests/test.sh"
    timeout_s: float = 600.0
    env: dict[str, str] = {}
    verdict: VerdictKind = "reward_file"
    shaping: Shaping = "task"
    weights: dict[str, float] = {}
    """Of single tests under the pass ratios, by test name; empty: all weigh the same."""


class HealthCheck(Struct, frozen=True, kw_only=True):
    """A command that succeeds once all is as it has to be. Polled as Docker does it."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


class Stage(Struct, frozen=True, kw_only=True):
    """A part of a task that is worked on and judged before the next part is told."""

    name: str
    instruction: str
    checker: Checker
    solution: str = ""
    agent_timeout_s: float | None = None
    files: str = ""
    """Absolute folder whose content is put into the workdir before the agent acts; a `setup.sh` in it is run."""
    healthcheck: HealthCheck | None = None
    min_reward: float | dict[str, float] | None = None
    """Less ends the task here; by name, where the checker gives several rewards."""


class Task(Struct, frozen=True, kw_only=True):
    """A problem: instruction, world and checker, whatever file format it came in."""

    task_id: TaskId
    suite: str = ""
    instruction: str
    image: Image = Image()
    checker: Checker = Checker()
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    solution: str = ""
    """Absolute path of the reference solution script; empty if the task has none."""
    solution_env: dict[str, str] = {}
    """What the script finds set, in all stages."""
    agent_timeout_s: float | None = None
    build_timeout_s: float = 600.0
    cpus: float = 1.0
    memory_mib: int = 2048
    disk_mib: int = 0
    """Most that its sandbox may write; 0: the task does not say."""
    network: bool = False
    stages: list[Stage] = []
    """Of a task that has some: all of them, in order. Instruction, checker and solution above are the first one's."""
    stage_rewards: Literal["mean", "final"] = "mean"
    """What such a task is worth: the mean over the stages that were judged, or the last one of them."""

    @property
    def checker_timeout_s(self) -> float:
        """Of all its checkers together."""
        return sum(stage.checker.timeout_s for stage in self.stages) or self.checker.timeout_s


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation in the chat roles of the model's template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


FinishReason: TypeAlias = Literal["stop", "length", "context", "abort"]
"""Why a generation ended: stop token or string; reply limit; model's context is full; aborted by us."""

StopReason: TypeAlias = Literal["submitted", "no_action", "max_turns", "reply_limit", "context", "time"]
"""Why a rollout ended, when its world did not fail."""

FailureKind: TypeAlias = Literal["sandbox", "checker", "no_reward", "engine", "agent", "function", "stale", "nonfinite"]
"""What broke when a rollout's world failed. A failed rollout never votes. `agent`: the task cannot be posed to this
model; `function`: an agent function of the program that embeds the engine raised."""


class TokenSequence(Struct, frozen=True, kw_only=True):
    """One append-only run of tokens exactly as the engine saw and sampled them; all lists have length T."""

    token_ids: list[int]
    sampled: list[bool]
    """True where the policy sampled the token: the loss mask."""
    logprobs: list[float]
    """The engine's log-probability of each sampled token (after temperature); 0.0 elsewhere."""
    prompt_tokens: int
    """Leading tokens before the first sampled one: shared by all rollouts of the group."""


class Turn(Struct, frozen=True, kw_only=True):
    """One generation and the tool result that followed it."""

    index: int
    sequence: int
    """Index into `Rollout.sequences`."""
    start: int
    end: int
    """Sampled tokens are `token_ids[start:end]` of that sequence."""
    finish_reason: FinishReason
    policy_version: int
    command: str = ""
    output: str = ""
    exit_code: int | None = None
    generate_s: float = 0.0
    tool_s: float = 0.0
    cached_tokens: int = 0
    message: int | None = None
    """Index into `Rollout.messages` of its reply; None where they hold it as no message of its own, as while it is
    sampled, and in files of older runs."""
    conversation: int = 0
    """Index into `Rollout.messages` of the first message of the conversation that it belongs to."""


class SampledTurn(Struct, frozen=True, kw_only=True):
    """A turn the moment it was sampled, while its tool call begins: what a teacher scores."""

    rollout_id: RolloutId
    group_id: GroupId
    task_id: TaskId
    attempt: int
    turn: int
    sequence: int
    token_ids: list[int]
    """Of its sequence, up to the turn's end."""
    start: int
    end: int
    """The turn's tokens are `token_ids[start:end]`."""
    logprobs: list[float]
    """The engine's, of the turn's tokens."""
    prompt_tokens: int
    """Of the rollout's opening prompt, with which the sequence begins; 0 if it does not."""
    policy_version: int


class FinalContent(Struct, frozen=True, kw_only=True):
    """A rollout whose tokens are final, while its checker still runs."""

    rollout_id: RolloutId
    group_id: GroupId
    attempt: int
    sequences: list[TokenSequence]
    policy_version: int

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(sequence.sampled) for sequence in self.sequences)


class UnscoredRollout(Struct, frozen=True, kw_only=True):
    """A rollout that has ended and is not judged yet: what a reward function sees."""

    rollout_id: RolloutId
    group_id: GroupId
    task_id: TaskId
    attempt: int
    policy_version: int
    messages: list[Message]
    sequences: list[TokenSequence]
    turns: list[Turn]
    stop: StopReason

    @property
    def reply(self) -> str:
        """The last thing the policy said; empty if it said nothing."""
        return next((each.content for each in reversed(self.messages) if each.role == "assistant"), "")


class Scored(Struct, frozen=True, kw_only=True, tag="scored"):
    """The checker gave a finite reward; a truncated rollout (`stop` other than submitted) is scored like any other."""

    reward: float
    rewards: dict[str, float] = {}
    stop: StopReason = "submitted"
    change: str = ""
    """Of a repair: what the agent changed, as a patch; bytes that are not UTF-8 are replaced."""


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The rollout's world failed: infrastructure, not the policy. Never a reward of zero."""

    reason: FailureKind
    detail: str


Outcome: TypeAlias = Scored | Failed


class Rollout(Struct, frozen=True, kw_only=True):
    """One attempt at a task: all its turns under one policy version."""

    rollout_id: RolloutId
    group_id: GroupId
    task_id: TaskId
    policy_version: int
    messages: list[Message]
    sequences: list[TokenSequence]
    turns: list[Turn]
    outcome: Outcome
    started_s: float
    """Unix time; the spans below are seconds."""
    generate_s: float = 0.0
    tool_s: float = 0.0
    score_s: float = 0.0
    attempt: int = 1
    image: str = ""
    """What its sandbox was made from: the id of a Docker image, or of what a Dockerfile made of a process sandbox
    (`sha256:...`). Empty where nothing was started or built, and in files of older runs."""
    image_digest: str = ""
    """`repository@sha256:...`, by which that image can be pulled again; empty where the Docker daemon knows none."""

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(sequence.sampled) for sequence in self.sequences)
