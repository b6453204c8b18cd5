"""TensorBoard's files, written by TensorBoard's own writer: neither torch nor TensorFlow is needed.

Look at them with `tensorboard --logdir runs`. The configuration is kept as a text beside the curves.
"""

from __future__ import annotations

import tomli_w
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from thundersync.tracking.base import Start, own_folder

FLUSH_S = 10


class TensorBoard:
    """Implements `Sink`."""

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None

    def start(self, config: dict[str, object], run: Start) -> None:
        folder = own_folder(run, "tensorboard")
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        if run.first_step:
            # TensorBoard then forgets what an earlier start said of the steps that are made again.
            self._writer.add_event(Event(step=run.first_step + 1, session_log=SessionLog(status=SessionLog.START)))
        text = "\n".join(f"    {line}" for line in tomli_w.dumps(config).splitlines())
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(tag="config", metadata=metadata, tensor=tensor)
        self._writer.add_event(Event(step=run.first_step, summary=Summary(value=[value])))
        self._writer.flush()

    def metrics(self, step: int, row: dict[str, float], at_s: float) -> None:
        self._add("train", step, row, at_s)

    def evaluation(self, step: int, row: dict[str, float], at_s: float) -> None:
        self._add("eval", step, row, at_s)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, prefix: str, step: int, row: dict[str, float], at_s: float) -> None:
        assert self._writer is not None
        values = [Summary.Value(tag=f"{prefix}/{name}", simple_value=value) for name, value in row.items()]
        self._writer.add_event(Event(step=step, wall_time=at_s, summary=Summary(value=values)))
