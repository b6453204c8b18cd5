"""Weights & Biases, through its own client. `WANDB_MODE=offline` keeps everything in the run's folder, to be sent later
by `wandb sync`; account, host and the rest are the environment's, as everywhere with this client.
"""

from __future__ import annotations

import secrets

import wandb
from wandb.sdk.wandb_run import Run

from thundersync.tracking.base import Start, own_folder


class WeightsAndBiases:
    """Implements `Sink`."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def start(self, config: dict[str, object], run: Start) -> None:
        # Its files go to <dir>/wandb; a resumed run goes on under the same id.
        identity = own_folder(run, "wandb") / "run-id.txt"
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=identity.read_text().strip(),
            resume="allow",
            dir=run.folder,
            config=config,
            settings=wandb.Settings(console="off", silent=True, init_timeout=90.0),
        )
        # The client's own count of calls must rise for ever; a resumed run makes steps again, so ours is the axis.
        self._run.define_metric("step", hidden=True)
        for prefix in ("train", "eval"):
            self._run.define_metric(f"{prefix}/*", step_metric="step")

    def metrics(self, step: int, row: dict[str, float], at_s: float) -> None:
        self._log("train", step, row)

    def evaluation(self, step: int, row: dict[str, float], at_s: float) -> None:
        self._log("eval", step, row)

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _log(self, prefix: str, step: int, row: dict[str, float]) -> None:
        assert self._run is not None
        self._run.log({"step": step} | {f"{prefix}/{name}": value for name, value in row.items()})
