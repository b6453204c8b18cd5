"""What a rollout has said so far, and where among its messages each reply stands: what whoever reads it needs.

Between those that know messages (`dialogue`, `policy`) and `attempt`, which knows turns. Knows nothing of sampling.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from thundersync.core.types import Message, TokenSequence, Turn


class Place(Struct, frozen=True, kw_only=True):
    """Where a reply stands, as indices into the rollout's messages."""

    message: int | None
    """The reply; None where the messages do not hold it as one."""
    conversation: int
    """The first message of its conversation."""


class Said(Struct, frozen=True, kw_only=True):
    """Copies: it stays as it is while the rollout goes on."""

    messages: list[Message] = []
    """Every conversation, one after another."""
    sequences: list[TokenSequence] = []
    places: dict[tuple[int, int], Place] = {}
    """By the sequence and the first token of each reply, which no two replies share."""

    def placed(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns in order, each with its place; those that were sampled side by side have ended in any order."""
        found = []
        for turn in sorted(turns, key=lambda turn: turn.index):
            place = self.places.get((turn.sequence, turn.start))
            if place is not None:
                turn = msgspec.structs.replace(turn, message=place.message, conversation=place.conversation)
            found.append(turn)
        return found


class Speaker(Protocol):
    """Keeps a rollout's conversations."""

    def said(self) -> Said:
        """From any thread, while the rollout goes on; decodes where it keeps ids only."""
