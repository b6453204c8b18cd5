"""How many gradient parts of open groups a trainer worker may hold: on its device, and in all.

By default streaming takes hardly more memory than a lazy trainer would. On a GPU a twentieth of what the worker holds
anyway is for parts, and the rest of them moves to host memory. On a CPU there is nowhere to move to: there a part takes
the place of activations, and passes are smaller beside it. Knows sizes only.
"""

from msgspec import Struct

from thundersync.config import Config
from thundersync.core.ready_queue import PartRoom
from thundersync.forecast.memory import FLOAT32, HEAD_CHUNK_TOKENS, Decoder, activation_bytes, learning_items, total
from thundersync.recipe import objective_of

SHARE = 0.05
EVERY_PART = 1_000_000


class PartBudget(Struct, frozen=True, kw_only=True):
    """Parts of one trainer worker."""

    resident: int
    """On its device; what is lent beyond that lies in host memory."""
    room: PartRoom


def part_budget(
    config: Config,
    *,
    whole: int,
    learning: int,
    width: int,
    workers: int,
    on_gpus: bool,
    decoder: Decoder | None = None,
) -> PartBudget:
    """`whole` and `learning` are parameters, `width` bytes of one in the model's dtype. Without a `decoder` the
    activations are not known, and no part takes their place."""
    part, given = FLOAT32 * learning, config.stream.partials_gib * 2**30
    held = total(
        learning_items(
            whole=whole,
            learning=learning,
            width=width,
            adapter=config.model.lora is not None,
            reference=bool(config.algo.kl_coef) and config.model.lora is None,
            sums=objective_of(config).sums.count,
            workers=workers,
            offload=config.optim.offload and on_gpus,
        )
    )
    here = int((given or SHARE * held) / part)
    if on_gpus:
        return PartBudget(resident=here, room=PartRoom(most=here + int(config.stream.spill_gib * 2**30 / part)))
    if given or decoder is None:
        return PartBudget(resident=EVERY_PART, room=PartRoom(most=here))
    token = _more_for_a_token(decoder, width=width, checkpointing=config.trainer.activation_checkpointing)
    tokens, spare = part / token, SHARE * held / token
    most = int((config.trainer.micro_batch_tokens + spare) / tokens)
    return PartBudget(resident=EVERY_PART, room=PartRoom(most=most, tokens=tokens, spare=spare))


def _more_for_a_token(decoder: Decoder, *, width: int, checkpointing: bool) -> float:
    """Bytes that a pass of another token has more, beyond what the output head holds for a chunk of them."""
    one, two = (
        activation_bytes(decoder, tokens=chunks * HEAD_CHUNK_TOKENS, width=width, checkpointing=checkpointing)
        for chunks in (1, 2)
    )
    return (two - one) / HEAD_CHUNK_TOKENS
