"""One tokenizer for all of the endpoint's tests: loading it is most of a small test's time."""

from typing import Any

import pytest

from tests.serve.rig import tokenizer


@pytest.fixture(scope="session")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))
