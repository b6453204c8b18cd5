"""What a trainer worker is told once, as plain values: importable without torch, so that messages can carry them."""

from msgspec import Struct


class OptimSettings(Struct, frozen=True, kw_only=True):
    """AdamW, clipping and schedule of the one optimizer step of a commit."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    """The gradient's L2 norm is cut to this before the step."""
    scheduler: str
    """`constant`, `linear` or `cosine`, each after a linear warm-up."""
    warmup_steps: int
    max_steps: int
    offload: bool = False
    """Keep master weights and moments in host memory (pinned beside a GPU), and make the optimizer step there."""


class LoraSettings(Struct, frozen=True, kw_only=True):
    """A low-rank adapter: W + (alpha / rank) x B @ A on the named linear layers. There is no dropout."""

    rank: int = 32
    alpha: float = 64.0
    target_modules: tuple[str, ...] = ("all-linear",)
    """Last parts or whole names of linear layers; `all-linear` is every one of them but the head."""
