"""What a model folder says about itself beyond its tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model
from thundersync.generate.manifest import read_manifest


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048}}, 2048),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        # Scaled once and for all: the length of the context changes nothing.
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096}}, 0),
    ],
)
def test_two_sets_of_rotary_factors_are_told_by_the_length_where_they_change(
    tmp_path: Path, fields: dict[str, Any], expected: int
) -> None:
    model = tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    config.pop("rope_scaling", None)
    (model / "config.json").write_text(json.dumps(config | fields))
    assert read_manifest(model).long_from == expected
