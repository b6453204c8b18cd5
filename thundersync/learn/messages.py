"""What the coordinator and a trainer worker say to each other. Frozen structs, msgpack on the wire.

A worker answers requests one by one, in order: a cohort's close is therefore always after its passes.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from thundersync.core.advantage import JoinScalars
from thundersync.core.objective import TermSums
from thundersync.generate.base import WeightArena
from thundersync.learn.settings import LoraSettings, OptimSettings

Mismatch: TypeAlias = Literal["none", "tis", "icepop", "seq_mask"]
Schedule: TypeAlias = Literal["immediate", "forward"]


class Terms(Struct, frozen=True, kw_only=True):
    """What a token's gradient is made of; how much of each is in the rows."""

    temperature: float = 1.0
    mismatch: Mismatch = "none"
    """Correction of the engine's sampling probabilities by the ratio trainer / engine."""
    mismatch_low: float = 0.0
    mismatch_high: float = 2.0
    kl: Literal["", "k1", "k2", "k3"] = ""
    """To the reference; k1 is only measured (it shifts rewards), k2 and k3 have gradients."""
    entropy: bool = False
    divergence: Literal["", "reverse", "forward", "mixed"] = ""
    """From the teacher's distribution; empty: of the sampled token alone, from the rows' teacher logprobs."""
    mix: float = 0.5
    sums: TermSums = TermSums()


class Request(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """From the coordinator."""


class Setup(Request, frozen=True, kw_only=True, tag="setup"):
    """Load the policy and be ready; with `checkpoint`, continue from it."""

    model_path: str
    dtype: str
    max_model_len: int
    arena_path: str
    """Shared-memory file that rank 0 creates and publishes weights in."""
    cpus: list[int]
    device: str
    terms: Terms
    optim: OptimSettings
    lora: LoraSettings | None = None
    reference_path: str = ""
    """Of a full fine-tuning's KL term; with an adapter, the policy without it is the reference."""
    teacher_path: str = ""
    """A frozen teacher of which the whole vocabulary counts: held here."""
    activation_checkpointing: bool = False
    block_tokens: int = 1_000_000
    """Longer rows are cut into blocks of this many tokens, one after another in memory."""
    resident_parts: int = 1_000_000
    """Parts kept on the device; more of them go to host memory."""
    seed: int = 0
    rank: int = 0
    world: int = 1
    rendezvous: str = ""
    """File through which the workers find each other."""
    timeout_s: float = 3600.0
    """Of a collective operation: how long a worker waits for the others."""
    checkpoint: str = ""


class OpenStep(Request, frozen=True, kw_only=True, tag="open_step"):
    """A new step: its sums are zero, and all its prompts begin with `prefix` (may be empty)."""

    prefix: list[int]


class Row(Struct, frozen=True, kw_only=True):
    """One token sequence of a piece, whole, prompt included. Lists have length T unless said."""

    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    """The engine's, for the importance weight and the mismatch metric."""
    policy: float = 0.0
    """Weight of each sampled token's policy gradient: length normalisation, times the advantage if that is known."""
    kl: float = 0.0
    entropy: float = 0.0
    teacher: float = 0.0
    """Weights of the other terms, coefficient and length normalisation together."""
    teacher_logprobs: list[float] = []
    """The teacher's, of each sampled token; 0.0 elsewhere. Empty without a teacher, or where it is held here."""
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    """[S][k]: the teacher's best tokens where the row's S sampled tokens stand, in order."""


class RunPass(Request, frozen=True, kw_only=True, tag="run_pass"):
    """One forward and backward over rows of one group."""

    group_id: str
    cohort_id: str
    prompt: list[int]
    """The group's common prompt: rows that begin with it share its block."""
    rows: list[Row]
    direct: bool
    """True: into the step's sums, the advantage is in the weights. False: the policy term goes into the cohort's parts
    for `reward`."""
    reward: float = 0.0
    base: float = 0.0


class RunHeld(Request, frozen=True, kw_only=True, tag="run_held"):
    """One forward and backward over the rows of one rollout whose reward is not known yet: kept by itself."""

    hold: str
    group_id: str
    prompt: list[int]
    rows: list[Row]


class SettleHeld(Request, frozen=True, kw_only=True, tag="settle_held"):
    """The reward of a held gradient is known: add it under `advantage` (zero throws it away), or, for None, to its
    cohort's parts for `reward`."""

    hold: str
    group_id: str
    cohort_id: str
    advantage: float | None
    reward: float
    base: float


class RunTurns(Request, frozen=True, kw_only=True, tag="run_turns"):
    """The next turns of a rollout, teacher scores known: `row` is its sequence up to now, `sampled` marks only what
    these turns sampled. `immediate`: their own backward now; `forward`: their forward, and one sweep at the end."""

    branch_id: str
    group_id: str
    prompt: list[int]
    row: Row
    schedule: Schedule


class CloseBranch(Request, frozen=True, kw_only=True, tag="close_branch"):
    """The rollout has no more turns: sweep what its later turns owe its earlier ones."""

    branch_id: str
    group_id: str


class CloseCohort(Request, frozen=True, kw_only=True, tag="close_cohort"):
    """Join the cohort's parts into the step's first sum (None: throw them away), then pull its groups' prompts."""

    cohort_id: str
    groups: list[str]
    join: JoinScalars | None


class Commit(Request, frozen=True, kw_only=True, tag="commit"):
    """The one optimizer step: minimised loss = -(the scaled sums), over all workers. Then write the arena."""

    scales: list[float]


class Discard(Request, frozen=True, kw_only=True, tag="discard"):
    """End the step without an optimizer step."""


class ReferencePiece(Struct, frozen=True, kw_only=True):
    """A rollout for the one-piece reference: all coefficients final, nothing shared, nothing streamed."""

    rollout_id: str
    rows: list[Row]


class Reference(Request, frozen=True, kw_only=True, tag="reference"):
    """Compute the textbook gradient of these pieces in one piece and keep it; each worker may get a share of them."""

    pieces: list[ReferencePiece]
    scales: list[float]


class Floor(Request, frozen=True, kw_only=True, tag="floor"):
    """The same once more, every layer off by one unit in the last place, against the reference: what rounding alone
    makes of it. Nothing of it is kept."""

    pieces: list[ReferencePiece]
    scales: list[float]


class Compare(Request, frozen=True, kw_only=True, tag="compare"):
    """The step's streamed gradient, summed over workers, against the reference; changes nothing."""

    scales: list[float]


class Limits(Request, frozen=True, kw_only=True, tag="limits"):
    """How the worker keeps parts and cuts rows from now on, between two steps. None: as it was set up."""

    resident_parts: int | None
    block_tokens: int | None


class Pin(Request, frozen=True, kw_only=True, tag="pin"):
    """Compute on these cores from now on, with a thread for each."""

    cpus: list[int]


class MeasureKl(Request, frozen=True, kw_only=True, tag="measure_kl"):
    """Sum over sampled tokens of policy minus reference logprob, per row: k1, for the reward."""

    rows: list[Row]


class Score(Request, frozen=True, kw_only=True, tag="score"):
    """The trainer's own log-probabilities of `token_ids` [T]: an audit, it changes nothing."""

    token_ids: list[int]


class Save(Request, frozen=True, kw_only=True, tag="save"):
    """Write this worker's share of a checkpoint into the folder `path`."""

    path: str


class Stop(Request, frozen=True, kw_only=True, tag="stop"):
    """End the process."""


Passes: TypeAlias = RunPass | RunHeld | RunTurns
StepWork: TypeAlias = Passes | SettleHeld | CloseBranch | CloseCohort
AnyRequest: TypeAlias = (
    Setup
    | OpenStep
    | RunPass
    | RunHeld
    | SettleHeld
    | RunTurns
    | CloseBranch
    | CloseCohort
    | Commit
    | Discard
    | Reference
    | Floor
    | Compare
    | Limits
    | Pin
    | MeasureKl
    | Score
    | Save
    | Stop
)


class Reply(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """From a worker."""


class Ready(Reply, frozen=True, kw_only=True, tag="ready"):
    parameters: int
    """Trainable ones: a part is 4 bytes each."""
    shares_prompts: bool
    """False: the model cannot be cut into blocks, so each row runs whole (exact, only slower)."""
    arena: WeightArena | None
    """Of rank 0."""
    device: str


class PassReport(Reply, frozen=True, kw_only=True, tag="pass_report"):
    """Sums over the pass; `mismatch` is |trainer - engine logprob| in nats."""

    busy_s: float
    tokens: int = 0
    sampled_tokens: int = 0
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    corrected: int = 0
    """Tokens whose importance weight was cut or set to zero."""
    kl_sum: float = 0.0
    """Over sampled tokens, of the estimator that is used (k2 or k3), in nats."""
    entropy_sum: float = 0.0
    divergence_sum: float = 0.0
    """From the teacher, over sampled tokens, in nats: of the distribution, or log policy - log teacher."""
    parts: int = 0
    """Gradient parts this worker holds now."""
    bad_rows: list[int] = []
    """Rows with a value that is not finite: the pass was not added, the step cannot be committed."""


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
    arena: WeightArena | None


class Comparison(Reply, frozen=True, kw_only=True, tag="comparison"):
    relative_l2: float
    """|streamed - reference| / |reference| over all trainable parameters."""
    worst: float
    """The largest, over tensors, of max |difference| / max |reference|."""
    worst_name: str
    norm: float
    """Of the reference."""
    digest: str
    """Of the bits of what was compared with the reference."""


class Scores(Reply, frozen=True, kw_only=True, tag="scores"):
    logprobs: list[float]
    """[T - 1]: of token 1 given token 0, and so on. For MeasureKl: one sum per row."""


class NotSaved(Reply, frozen=True, kw_only=True, tag="not_saved"):
    """The checkpoint could not be written; nothing else has happened."""

    error: str


class Broken(Reply, frozen=True, kw_only=True, tag="broken"):
    """The worker met an exception and ends."""

    error: str
    traceback: str
    by_another: bool = False
    """It could not go on because another worker went away."""


AnyReply: TypeAlias = Ready | PassReport | Done | Committed | Comparison | Scores | NotSaved | Broken
