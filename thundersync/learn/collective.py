"""The trainer workers as one group: what they say to each other at a commit, and at no other time.

Every operation works in place on one flat tensor, of which each rank owns an equal slice. Sums are taken in the order
of the ranks, so that the same gradients give the same bits whatever the backend does. One machine only: both backends
are kept on the loopback interface. Knows nothing of optimizers; which rank does what is its callers' business.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thundersync.errors import ThundersyncError

SLAB = 1 << 22
"""Elements sent to each rank at once while reducing: bounds the scratch memory to 2 x ranks x 16 MiB."""


class RanksLost(ThundersyncError):
    """Another trainer worker went away, or did not take part within the time limit."""


class Ranks:
    """One worker on its own: every operation is the identity, without a copy. `join` gives the real group."""

    rank = 0
    world = 1

    @staticmethod
    def alone() -> Ranks:
        return Ranks()

    @staticmethod
    def join(rank: int, world: int, rendezvous: str, device: str, timeout_s: float) -> Ranks:
        """Meet the other `world - 1` workers through the file `rendezvous` (a new one for each meeting, in a private
        folder). NCCL on CUDA devices, gloo elsewhere; `timeout_s` bounds the meeting and every operation.

        Raises: RanksLost.
        """
        if world == 1:
            return Ranks()
        where = torch.device(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        return _JoinedRanks(rank, world, rendezvous, where, timeout_s)

    def own(self, size: int) -> slice:
        """This rank's slice of `size` elements; slices of neighbours differ by at most one element."""
        return self._slice(self.rank, size)

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """This rank's slice of the sum over ranks: a view of `flat` [P], whose other elements are then undefined."""
        return flat

    def all_gather(self, flat: Tensor) -> None:
        """Fill `flat` [P] on every rank with the slices that the ranks own in theirs."""

    def sum(self, value: float) -> float:
        """The sum of `value` over ranks, in float64 and the order of the ranks."""
        return value

    def total(self, flat: Tensor) -> Tensor:
        """The sum of `flat` [P] over ranks, on every rank; `flat` keeps its values (alone, it is the result itself)."""
        return flat

    def close(self) -> None:
        """Leave the group. The others cannot go on without this rank."""

    def _slice(self, rank: int, size: int) -> slice:
        return slice(rank * size // self.world, (rank + 1) * size // self.world)


class _JoinedRanks(Ranks):
    def __init__(self, rank: int, world: int, rendezvous: str, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world, self._device = rank, world, device
        limit = timedelta(seconds=timeout_s)
        # Left alone, both libraries listen on whatever address the host's name has.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, _loopback())
        with self._named("meet"):
            store = dist.FileStore(rendezvous, world)  # type: ignore[attr-defined]
            store.set_timeout(limit)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=limit,
                device_id=device if device.type == "cuda" else None,
            )

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        # Exchanged and added here instead of by the backend's own reduce-scatter: the order of the sum is ours, flat
        # needs no padding, and the result lies in its place.
        size = flat.numel()
        own = flat[self.own(size)]
        longest = -(-size // self.world)
        width = min(SLAB, longest)
        sent = flat.new_zeros(self.world, width)
        received = torch.empty_like(sent)
        with self._named("reduce"):
            for start in range(0, longest, width):
                for peer in range(self.world):
                    piece = flat[self._slice(peer, size)][start : start + width]
                    sent[peer, : piece.numel()] = piece
                dist.all_to_all_single(received, sent)
                target = own[start : start + width]
                target.copy_(received[0, : target.numel()])
                for peer in range(1, self.world):
                    target.add_(received[peer, : target.numel()])
        return own

    def all_gather(self, flat: Tensor) -> None:
        with self._named("gather"):
            for peer in range(self.world):
                piece = flat[self._slice(peer, flat.numel())]
                if piece.numel():
                    dist.broadcast(piece, src=peer)

    def sum(self, value: float) -> float:
        values = torch.full((self.world,), value, dtype=torch.float64, device=self._device)
        self.all_gather(values)
        return float(sum(values.tolist()))

    def total(self, flat: Tensor) -> Tensor:
        result = flat.clone()
        self.reduce_scatter(result)
        self.all_gather(result)
        return result

    def close(self) -> None:
        dist.destroy_process_group()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch.distributed raises nothing finer for all backends
            raise RanksLost(
                f"trainer worker {self.rank} of {self.world} could not {what} with the others: {error}",
                remedy="See the logs of all trainer workers: the one that ended first says why.",
            ) from error


def _loopback() -> str:
    """The loopback interface's name: `lo` on Linux, `lo0` on macOS."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
