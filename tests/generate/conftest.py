"""One engine per backend for the whole session: starting them is the slow part."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.generate.rig import Rig, new_generator
from tests.tiny import tiny_model

BACKENDS = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=BACKENDS)
async def rig(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp(request.param)
    generator = new_generator(request.param, tiny, folder / "engine.log")
    await generator.start()
    try:
        yield Rig(generator, tiny, folder)
    finally:
        await generator.close()
