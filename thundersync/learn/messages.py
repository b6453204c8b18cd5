"""What the coordinator and a trainer worker say to each other. Frozen structs, msgpack on the wire.

A worker answers requests one by one, in order: a group's close is therefore always after its passes.
"""

from typing import TypeAlias

from msgspec import Struct

from thundersync.core.advantage import JoinScalars
from thundersync.generate.base import WeightArena


class Request(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """From the coordinator."""


class Setup(Request, frozen=True, kw_only=True, tag="setup"):
    """Load the policy and be ready; with `checkpoint`, continue from it."""

    model_path: str
    dtype: str
    max_model_len: int
    arena_path: str
    """Shared-memory file this worker creates and publishes weights in."""
    cpus: list[int]
    device: str
    temperature: float
    importance_cap: float | None
    """Cap of the truncated importance weight; None = no correction of the engine's probabilities."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    scheduler: str
    warmup_steps: int
    max_steps: int
    checkpoint: str = ""


class OpenStep(Request, frozen=True, kw_only=True, tag="open_step"):
    """A new step: its sum is zero, and all its prompts begin with `prefix` (may be empty)."""

    prefix: list[int]


class Row(Struct, frozen=True, kw_only=True):
    """One token sequence of a piece, whole, prompt included. Lists have length T."""

    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    """The engine's, for the importance weight and the mismatch metric."""
    weight: float
    """On each sampled token: length normalisation, times the advantage if that is known."""


class RunPass(Request, frozen=True, kw_only=True, tag="run_pass"):
    """One forward and backward over rows of one group."""

    group_id: str
    prompt: list[int]
    """The group's common prompt: rows that begin with it share its block."""
    rows: list[Row]
    direct: bool
    """True: into the step's sum, the advantage is in the weights. False: into the group's parts for `reward`."""
    reward: float
    base: float


class CloseGroup(Request, frozen=True, kw_only=True, tag="close_group"):
    """Join the group's parts into the step's sum (None: throw them away), then pull its prompt."""

    group_id: str
    join: JoinScalars | None


class Commit(Request, frozen=True, kw_only=True, tag="commit"):
    """The one optimizer step: minimised loss = -scale x (the step's sum). Then write the arena."""

    scale: float


class Discard(Request, frozen=True, kw_only=True, tag="discard"):
    """End the step without an optimizer step."""


class Score(Request, frozen=True, kw_only=True, tag="score"):
    """The trainer's own log-probabilities of `token_ids` [T]: an audit, it changes nothing."""

    token_ids: list[int]


class Save(Request, frozen=True, kw_only=True, tag="save"):
    """Write the model (HF format) and the optimizer's state into the folder `path`."""

    path: str


class Stop(Request, frozen=True, kw_only=True, tag="stop"):
    """End the process."""


AnyRequest: TypeAlias = Setup | OpenStep | RunPass | CloseGroup | Commit | Discard | Score | Save | Stop


class Reply(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """From a worker."""


class Ready(Reply, frozen=True, kw_only=True, tag="ready"):
    parameters: int
    shares_prompts: bool
    """False: the model cannot be cut into blocks, so each row runs whole (exact, only slower)."""
    arena: WeightArena
    device: str


class PassReport(Reply, frozen=True, kw_only=True, tag="pass_report"):
    """Sums over the pass; `mismatch` is |trainer - engine logprob| in nats."""

    busy_s: float
    tokens: int
    sampled_tokens: int
    mismatch_sum: float
    mismatch_max: float
    importance_capped: int
    parts: int
    """Gradient parts this worker holds now."""


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    busy_s: float = 0.0


class Committed(Reply, frozen=True, kw_only=True, tag="committed"):
    finite: bool
    """False: the gradient was not finite; nothing was changed."""
    grad_norm: float
    """Before clipping."""
    lr: float
    busy_s: float
    memory_peak_gib: float
    arena: WeightArena


class Scores(Reply, frozen=True, kw_only=True, tag="scores"):
    logprobs: list[float]
    """[T - 1]: of token 1 given token 0, and so on."""


class NotSaved(Reply, frozen=True, kw_only=True, tag="not_saved"):
    """The checkpoint could not be written; nothing else has happened."""

    error: str


class Broken(Reply, frozen=True, kw_only=True, tag="broken"):
    """The worker met an exception and ends."""

    error: str
    traceback: str


AnyReply: TypeAlias = Ready | PassReport | Done | Committed | Scores | NotSaved | Broken
