"""How many gradient parts of open groups a trainer worker may hold: on its device, and in all.

What lies on a GPU by default is a twentieth of what the worker holds anyway, so that streaming takes hardly more memory
there than a lazy trainer; the rest moves to host memory. A CPU's parts are in host memory already. Knows sizes only.
"""

from msgspec import Struct

from thundersync.config import Config
from thundersync.forecast.memory import FLOAT32, learning_items
from thundersync.recipe import objective_of

GPU_SHARE = 0.05
CPU_GIB = 8.0
EVERY_PART = 1_000_000


class PartBudget(Struct, frozen=True, kw_only=True):
    """Parts of one trainer worker."""

    resident: int
    """On its device; what is lent beyond that lies in host memory."""
    most: int


def part_budget(config: Config, *, whole: int, learning: int, width: int, workers: int, on_gpus: bool) -> PartBudget:
    """`whole` and `learning` are parameters, `width` bytes of one in the model's dtype."""
    part = FLOAT32 * learning
    if not on_gpus:
        return PartBudget(resident=EVERY_PART, most=int((config.stream.partials_gib or CPU_GIB) * 2**30 / part))
    held = sum(
        item.size
        for item in learning_items(
            whole=whole,
            learning=learning,
            width=width,
            adapter=config.model.lora is not None,
            reference=bool(config.algo.kl_coef) and config.model.lora is None,
            sums=objective_of(config).sums.count,
            workers=workers,
            offload=config.optim.offload,
        )
        if item.where == "device"
    )
    here = config.stream.partials_gib * 2**30 or GPU_SHARE * held
    return PartBudget(resident=int(here / part), most=int(here / part) + int(config.stream.spill_gib * 2**30 / part))
