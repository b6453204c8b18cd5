"""The feed's vocabulary: everything a viewer can know about a run, as versioned structs.

Written to `events.jsonl` (one JSON object a line) and published over ZeroMQ (msgpack). Viewers keep what they
know and ignore unknown kinds; a changed meaning raises SCHEMA. Knows nothing of sockets, files or screens.
"""

import math
from typing import Any, TypeAlias, get_args

import msgspec
from msgspec import Struct, field

SCHEMA = 1


class Event(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=False):
    at_s: float
    """Unix time at the coordinator."""


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
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
    """`stream`, `group` or `lazy`."""
    max_steps: int
    start_step: int
    """0, or the commits already made when resumed."""
    prompts_per_step: int
    group_size: int
    seed: int
    engine_devices: int = 0
    """GPUs or cores that generate; 0: a version of thundersync that did not tell."""
    trainer_devices: int = 0
    """GPUs or cores that learn."""
    trainer_workers: int = 0
    """Each works one pass at a time, on one of the GPUs or on its share of the cores."""
    on_gpus: bool = False
    dtype: str = ""
    """Of the policy's weights, `float32` or `bfloat16`; empty: a version of thundersync that did not tell."""


class StepOpened(Event, frozen=True, kw_only=True, tag="step_opened"):
    step: int
    policy_version: int
    group_ids: list[str]
    task_ids: list[str]
    group_size: int
    mode: str = ""
    """As `RunStarted.mode`, of this step: a bench has steps of several."""


class RolloutStarted(Event, frozen=True, kw_only=True, tag="rollout_started"):
    rollout_id: str
    group_id: str
    task_id: str
    attempt: int = 1


class RolloutSeated(Event, frozen=True, kw_only=True, tag="rollout_seated"):
    """An attempt was given an engine replica, which generates all its turns."""

    rollout_id: str
    engine: int


class TurnStarted(Event, frozen=True, kw_only=True, tag="turn_started"):
    """The engine has the prompt of this turn."""

    rollout_id: str
    turn: int


class TurnGenerated(Event, frozen=True, kw_only=True, tag="turn_generated"):
    rollout_id: str
    turn: int
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generate_s: float
    finish_reason: str


class TurnAborted(Event, frozen=True, kw_only=True, tag="turn_aborted"):
    """Nothing came of what `TurnStarted` told: the request was given up, or the engine gave no token. It counts as no
    turn, and its number is not used again."""

    rollout_id: str
    turn: int


class SandboxStarted(Event, frozen=True, kw_only=True, tag="sandbox_started"):
    """A rollout's sandbox is there and prepared. Agents that use none have none."""

    rollout_id: str
    start_s: float
    """From when it was asked for."""


class HistoryForked(Event, frozen=True, kw_only=True, tag="history_forked"):
    """What the model is shown next does not extend what it said before: the rollout goes on in a further sequence."""

    rollout_id: str
    reason: str


class ToolStarted(Event, frozen=True, kw_only=True, tag="tool_started"):
    rollout_id: str
    turn: int
    command: str


class ToolFinished(Event, frozen=True, kw_only=True, tag="tool_finished"):
    rollout_id: str
    turn: int
    exit_code: int | None
    """None: what ran has none, as keys that were pressed."""
    tool_s: float


class TurnScored(Event, frozen=True, kw_only=True, tag="turn_scored"):
    """A teacher has scored a turn's tokens: its backward may start."""

    rollout_id: str
    turn: int
    tokens: int
    score_s: float
    held: bool
    """The teacher is held in the trainer workers, and scores in the turn's own pass."""


class ScoringStarted(Event, frozen=True, kw_only=True, tag="scoring_started"):
    rollout_id: str


class RolloutScored(Event, frozen=True, kw_only=True, tag="rollout_scored"):
    rollout_id: str
    group_id: str
    reward: float
    stop: str
    turns: int
    sampled_tokens: int
    score_s: float


class RolloutFailed(Event, frozen=True, kw_only=True, tag="rollout_failed"):
    rollout_id: str
    group_id: str
    failure: str
    detail: str
    will_retry: bool


class PassStarted(Event, frozen=True, kw_only=True, tag="pass_started"):
    """A trainer worker began one backward pass over these pieces."""

    worker: int
    pass_id: int
    rollout_ids: list[str]
    tokens: int
    queued: int
    """Pieces still waiting behind it."""


class PassDone(Event, frozen=True, kw_only=True, tag="pass_done"):
    worker: int
    pass_id: int
    rollout_ids: list[str]
    busy_s: float


class RolloutSkipped(Event, frozen=True, kw_only=True, tag="rollout_skipped"):
    """Its advantage is known to be zero, so its backward is never worked."""

    rollout_id: str


class GroupClosed(Event, frozen=True, kw_only=True, tag="group_closed"):
    group_id: str
    rewards: list[float]
    flat: bool
    dropped: bool = False
    """Fewer than `min_group_size` members were scored: the group does not count."""


class Audited(Event, frozen=True, kw_only=True, tag="audited"):
    """A live step's streamed gradient was compared with its one-piece gradient, right before the commit."""

    step: int
    relative_l2: float
    """|streamed - one-piece| / |one-piece|."""
    worst: float
    """The largest, over tensors, of max |difference| / max |one-piece|; `worst_name` is whose."""
    worst_name: str
    tolerance: float
    """Of `relative_l2`."""
    ok: bool
    """False: nothing was committed, and the run ends."""


class StepCommitted(Event, frozen=True, kw_only=True, tag="step_committed"):
    """Also one row of `metrics.jsonl`, flattened."""

    step: int
    policy_version: int
    """After the commit and its publish."""
    empty: bool
    """All groups flat, dropped or failed: no optimizer step was made."""
    metrics: dict[str, float]
    """Viewers look for: `reward_mean`, `reward_std`, `step_s`, `engine_busy`, `trainer_busy` (shares of the step),
    `queue_wait_s`, `tokens` (sampled), `grad_norm`, `lr`, `mismatch_mean`, `mismatch_max`, `staleness`."""


class WeightsPublished(Event, frozen=True, kw_only=True, tag="weights_published"):
    policy_version: int
    publish_s: float


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    step: int
    path: str


class EvalStarted(Event, frozen=True, kw_only=True, tag="eval_started"):
    policy_version: int
    rollouts: int


class EvalFinished(Event, frozen=True, kw_only=True, tag="eval_finished"):
    policy_version: int
    reward_mean: float
    scored: int
    failed: int
    seconds: float
    pass_at_1: float = math.nan
    """Mean over tasks of the share of scored rollouts with a reward of 1 or more."""


class EngineGauge(Struct, frozen=True, kw_only=True):
    """One engine; how busy it was over the last few seconds, its tokens over the last minute."""

    running: int
    """Requests in flight."""
    busy: float
    tokens_per_s: float
    """Sampled, of replies that have ended."""
    prompt_tokens_per_s: float
    cached_share: float
    """Of the prompt tokens: those found in the prefix cache. 0 while no prompt came."""
    kv_asked: float
    """Prompt tokens of the requests in flight as a share of what the KV cache holds; a prefix that several share counts
    for each, so that it may exceed 1. 0 where the engine does not say what its cache holds."""


class SandboxGauge(Struct, frozen=True, kw_only=True):
    """Sandboxes that wait for the next step, and how long the latest calls took."""

    ready: int
    starting: int
    start_p95_s: float
    command_p95_s: float
    """Of a command, beyond its own time."""
    close_p95_s: float


class Gauges(Event, frozen=True, kw_only=True, tag="gauges"):
    """Twice a second: what changes continuously. Shares are over the last few seconds, 0 to 1."""

    engine_busy: float
    trainer_busy: float
    generate_running: int
    tools_running: int
    queue_pieces: int
    open_slots: int
    loop_lag_ms: float
    """By how much this event is late: one moment of the loop in half a second."""
    tokens_per_s: float
    engines: list[EngineGauge] = field(default_factory=list)
    """In the order of the replicas."""
    sandboxes: SandboxGauge | None = None
    loop_lag_p50_ms: float = 0.0
    """By how much timers were late that were due every 20 ms since the last of these events: their median."""
    loop_lag_p99_ms: float = 0.0
    loop_lag_max_ms: float = 0.0
    """0 in all three: a version of thundersync that did not tell."""


class Warned(Event, frozen=True, kw_only=True, tag="warned"):
    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """`ok` False: the run ended by an error or an interrupt, told in `reason`."""

    ok: bool
    reason: str = ""
    steps: int = 0
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    """Where the time went, fractions of wall-clock: generation busy, trainer busy, commit, publish, eval."""


AnyEvent: TypeAlias = (
    RunStarted
    | StepOpened
    | RolloutStarted
    | RolloutSeated
    | SandboxStarted
    | HistoryForked
    | TurnStarted
    | TurnGenerated
    | TurnAborted
    | ToolStarted
    | TurnScored
    | ToolFinished
    | ScoringStarted
    | RolloutScored
    | RolloutFailed
    | PassStarted
    | PassDone
    | RolloutSkipped
    | GroupClosed
    | Audited
    | StepCommitted
    | WeightsPublished
    | CheckpointSaved
    | EvalStarted
    | EvalFinished
    | Gauges
    | Warned
    | RunFinished
)

KINDS: frozenset[str] = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))


def pack(event: Event) -> bytes:
    """For the wire: msgpack. Raises TypeError where a value is no plain number, text, list or dict."""
    return msgspec.msgpack.encode(event)


def unpack(raw: bytes | msgspec.Raw) -> AnyEvent | None:
    """The event of `pack`; None for a kind this version does not know. Raises msgspec.ValidationError if malformed."""
    try:
        return _UNPACK.decode(raw)
    except msgspec.ValidationError:
        if _known(msgspec.msgpack.decode(raw)):
            raise
        return None


def to_line(event: Event) -> bytes:
    """For `events.jsonl`: one JSON object and a newline. JSON has no NaN or infinity; they become null."""
    return msgspec.json.encode(event) + b"\n"


def from_line(line: bytes) -> AnyEvent | None:
    """The event of `to_line`, null read as NaN; None for an unknown kind. Raises msgspec.DecodeError on a torn line."""
    try:
        return _FROM_LINE.decode(line)
    except msgspec.ValidationError:
        fields = msgspec.json.decode(line)
        if not _known(fields):
            return None
        event: AnyEvent = msgspec.convert(_nan_for_null(fields), type=AnyEvent)
        return event


def _known(fields: Any) -> bool:
    return not isinstance(fields, dict) or fields.get("kind") in KINDS


def _nan_for_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nan_for_null(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_nan_for_null(inner) for inner in value]
    return math.nan if value is None else value


_UNPACK: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
_FROM_LINE: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
