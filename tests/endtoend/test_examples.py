"""Each example runs as it stands, on a tiny model: only the configuration is another one."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

from tests.endtoend.test_embedding import small
from thundersync import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(request.param)


def by_name(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


def test_they_share_a_configuration_that_loads() -> None:
    assert load_config(EXAMPLES / "small.toml", own_tasks=True).sandbox.runtime == "none"


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    assert f"examples/{name}.py" in text or f"{name}:small" in text
    assert f"{name}.py" in (EXAMPLES.parent / "docs" / "embedding.md").read_text()


@pytest.mark.slow
@by_name("own_reward")
async def test_own_reward(example: ModuleType, tmp_path: Path) -> None:
    means = await example.main(small(tmp_path))
    assert len(means) == 2 and all(0 < mean <= 1 for mean in means)


@pytest.mark.slow
@by_name("own_agent")
async def test_own_agent(example: ModuleType, tmp_path: Path) -> None:
    means = await example.main(small(tmp_path))
    assert len(means) == 2 and all(map(math.isfinite, means))


@pytest.mark.slow
@by_name("own_objective")
async def test_own_objective(example: ModuleType, tmp_path: Path) -> None:
    norms = await example.main(small(tmp_path, stream={"verify_every": 1}))
    assert len(norms) == 2 and max(norms) > 0


@pytest.mark.slow
@by_name("several_seeds")
async def test_several_seeds(example: ModuleType, tmp_path: Path) -> None:
    assert len(await example.main(small(tmp_path, max_steps=1), seeds=(1, 2))) == 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"seed-1", "seed-2"}


@pytest.mark.slow
@by_name("in_a_web_app")
async def test_in_a_web_app(example: ModuleType, tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx")
    app = example.application(small(tmp_path))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            answer = await client.post("/ask", params={"question": "Why is the sky blue?"})
            assert isinstance(answer.json()["answer"], str)
            await app.state.training
            assert len((await client.get("/progress")).json()["rewards"]) == 2


@by_name("in_a_web_app")
def test_the_web_app_takes_its_configuration(example: ModuleType, tmp_path: Path) -> None:
    routes = {route.path for route in example.application(small(tmp_path)).routes}
    assert {"/ask", "/progress"} <= routes
