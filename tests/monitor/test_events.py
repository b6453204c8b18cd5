import json
import math

import msgspec
import pytest

from tests.monitor.fake_run import fake_run
from thundersync.monitor import events as e


def test_every_event_survives_the_wire_and_the_file() -> None:
    stream = list(fake_run())
    assert [e.unpack(e.pack(event)) for event in stream] == stream
    assert [e.from_line(e.to_line(event)) for event in stream] == stream


def test_every_kind_of_event_is_in_the_union() -> None:
    assert {kind.__struct_config__.tag for kind in e.Event.__subclasses__()} == e.KINDS


def test_an_unknown_kind_is_passed_over_but_a_malformed_event_is_not() -> None:
    assert e.from_line(b'{"kind": "from_the_future", "at_s": 1}') is None
    assert e.unpack(msgspec.msgpack.encode({"kind": "from_the_future", "at_s": 1})) is None
    with pytest.raises(msgspec.ValidationError):
        e.from_line(b'{"kind": "warned", "at_s": "yesterday", "text": ""}')
    with pytest.raises(msgspec.ValidationError):
        e.unpack(msgspec.msgpack.encode({"kind": "warned"}))


def test_a_field_of_the_future_is_passed_over() -> None:
    assert e.from_line(b'{"kind": "warned", "at_s": 1.0, "text": "t", "more": [1]}') == e.Warned(at_s=1.0, text="t")


def test_a_metric_that_is_no_number_is_null_in_the_file_and_comes_back_as_nan() -> None:
    event = e.StepCommitted(at_s=1.0, step=1, policy_version=1, empty=True, metrics={"grad_norm": math.inf, "lr": 1.0})
    line = e.to_line(event)
    assert json.loads(line)["metrics"] == {"grad_norm": None, "lr": 1.0}
    back = e.from_line(line)
    assert isinstance(back, e.StepCommitted) and math.isnan(back.metrics["grad_norm"])
