"""The feed's vocabulary: everything a viewer can know about a run, as versioned structs.

Written to `events.jsonl` (one JSON object a line) and published over ZeroMQ (msgpack). Viewers keep what they
know and ignore unknown kinds; a changed meaning raises SCHEMA.
"""

from typing import TypeAlias

from msgspec import Struct, field

SCHEMA = 1


class Event(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=False):
    at_s: float
    """Unix time at the coordinator."""


class RunStarted(Event, tag="run_started"):
    schema: int = SCHEMA
    name: str
    run_dir: str
    pid: int
    model: str
    backend: str
    """`vllm` or `transformers`."""
    runtime: str
    """`docker` or `process`."""
    algo: str
    mode: str
    """`stream` or `lazy`."""
    max_steps: int
    start_step: int
    """0, or the commits already made when resumed."""
    prompts_per_step: int
    group_size: int
    seed: int


class StepOpened(Event, tag="step_opened"):
    step: int
    policy_version: int
    group_ids: list[str]
    task_ids: list[str]
    group_size: int


class RolloutStarted(Event, tag="rollout_started"):
    rollout_id: str
    group_id: str
    task_id: str
    attempt: int = 1


class TurnStarted(Event, tag="turn_started"):
    """The engine has the prompt of this turn."""

    rollout_id: str
    turn: int


class TurnGenerated(Event, tag="turn_generated"):
    rollout_id: str
    turn: int
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generate_s: float
    finish_reason: str


class ToolStarted(Event, tag="tool_started"):
    rollout_id: str
    turn: int
    command: str


class ToolFinished(Event, tag="tool_finished"):
    rollout_id: str
    turn: int
    exit_code: int
    tool_s: float


class ScoringStarted(Event, tag="scoring_started"):
    rollout_id: str


class RolloutScored(Event, tag="rollout_scored"):
    rollout_id: str
    group_id: str
    reward: float
    stop: str
    turns: int
    sampled_tokens: int
    score_s: float


class RolloutFailed(Event, tag="rollout_failed"):
    rollout_id: str
    group_id: str
    failure: str
    detail: str
    will_retry: bool


class PassStarted(Event, tag="pass_started"):
    """A trainer worker began one backward pass over these pieces."""

    worker: int
    pass_id: int
    rollout_ids: list[str]
    tokens: int
    queued: int
    """Pieces still waiting behind it."""


class PassDone(Event, tag="pass_done"):
    worker: int
    pass_id: int
    rollout_ids: list[str]
    busy_s: float


class RolloutSkipped(Event, tag="rollout_skipped"):
    """Its advantage is known to be zero, so its backward is never worked."""

    rollout_id: str


class GroupClosed(Event, tag="group_closed"):
    group_id: str
    rewards: list[float]
    flat: bool
    dropped: bool = False
    """Fewer than `min_group_size` members were scored: the group does not count."""


class StepCommitted(Event, tag="step_committed"):
    """Also one row of `metrics.jsonl`, flattened."""

    step: int
    policy_version: int
    """After the commit and its publish."""
    empty: bool
    """All groups flat, dropped or failed: no optimizer step was made."""
    metrics: dict[str, float]


class WeightsPublished(Event, tag="weights_published"):
    policy_version: int
    publish_s: float


class CheckpointSaved(Event, tag="checkpoint_saved"):
    step: int
    path: str


class EvalStarted(Event, tag="eval_started"):
    policy_version: int
    rollouts: int


class EvalFinished(Event, tag="eval_finished"):
    policy_version: int
    reward_mean: float
    scored: int
    failed: int
    seconds: float


class Gauges(Event, tag="gauges"):
    """Twice a second: what changes continuously. Shares are over the last few seconds, 0 to 1."""

    engine_busy: float
    trainer_busy: float
    generate_running: int
    tools_running: int
    queue_pieces: int
    open_slots: int
    loop_lag_ms: float
    tokens_per_s: float


class Warned(Event, tag="warned"):
    text: str


class RunFinished(Event, tag="run_finished"):
    """`ok` False: the run ended by an error or an interrupt, told in `reason`."""

    ok: bool
    reason: str = ""
    steps: int = 0
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    """Where the time went, fractions of wall-clock: generation busy, trainer busy, commit, publish, eval."""


AnyEvent: TypeAlias = (
    RunStarted | StepOpened | RolloutStarted | TurnStarted | TurnGenerated | ToolStarted | ToolFinished | ScoringStarted
    | RolloutScored | RolloutFailed | PassStarted | PassDone | RolloutSkipped | GroupClosed | StepCommitted
    | WeightsPublished | CheckpointSaved | EvalStarted | EvalFinished | Gauges | Warned | RunFinished
)
