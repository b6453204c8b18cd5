"""The process of one tracker: reads what the run tells on its standard input, and passes it to the tracker.

`python -m thundersync.tracking.child NAME`. The first error ends it, with a traceback in its log. When the input ends
without a goodbye the run was killed, and what was tracked is still finished properly. Ctrl-C is the run's to handle.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable

import msgspec

from thundersync.tracking.base import Evaluation, Finish, Metrics, Sink, Start, Told


def serve(sink: Sink, lines: Iterable[bytes]) -> None:
    """Until goodbye or the end of `lines`. Raises what the tracker raises, and msgspec.DecodeError."""
    decoder = msgspec.json.Decoder[Told](Told)
    try:
        for line in lines:
            match decoder.decode(line):
                case Start() as start:
                    sink.start(start.config, start)
                case Metrics(step=step, row=row, at_s=at_s):
                    sink.metrics(step, _finite(row), at_s)
                case Evaluation(step=step, row=row, at_s=at_s):
                    sink.evaluation(step, _finite(row), at_s)
                case Finish():
                    return
    finally:
        sink.finish()


def sink_of(name: str) -> Sink:
    """Each tracker's package is imported only where it is asked for."""
    if name == "tensorboard":
        from thundersync.tracking.tensorboard import TensorBoard

        return TensorBoard()
    from thundersync.tracking.wandb import WeightsAndBiases

    return WeightsAndBiases()


def end_after_parent(parent: int, *, grace_s: float) -> None:
    """End this process `grace_s` after its parent, should the tracker not have let it finish by then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="end-after-parent", daemon=True).start()


def _finite(row: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None}


if __name__ == "__main__":
    end_after_parent(os.getppid(), grace_s=30.0)
    serve(sink_of(sys.argv[1]), sys.stdin.buffer)
