"""The gradients of an independent trainer, through this project's own trainer code; see `tests/oracle/`."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import gradient_oracle as oracle
from tests.oracle_adapter import gradient

EXPECTED = json.loads((Path(oracle.__file__).parent / "expected.json").read_text())["cases"]
CASES = {case["name"]: case for case in oracle.cases()}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_independent_trainers_gradient_is_met_under_any_arrival_order(name: str) -> None:
    case, expected = CASES[name], EXPECTED[name]
    allowed = max(2e-5, 3 * expected["trl_floor"])
    for permutation in range(4):
        if permutation:
            order = np.random.RandomState(permutation).permutation(len(case["rollouts"])).tolist()
            case = {**case, "arrival": order}
        found = oracle.sketch(gradient(case, oracle.tiny_model(7), oracle.aux_model(case)))
        assert oracle.compare(found, expected) <= allowed


@pytest.mark.parametrize("name", sorted(CASES.keys() - EXPECTED.keys()))
def test_the_oracles_other_cases_meet_its_streaming_reference(name: str) -> None:
    case = CASES[name]
    found = gradient(case, oracle.tiny_model(7), oracle.aux_model(case))
    distance, worst = oracle.rel(found, oracle.streaming_reference(case, oracle.tiny_model(7), oracle.aux_model(case)))
    assert distance < 2e-5
    assert worst < 2e-4
