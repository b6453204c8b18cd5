"""What the documents say is true of the tree: links, the map of rooms, the sketch of a configuration, the picture."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from thundersync.config_file import config_from

REPO = Path(__file__).resolve().parent.parent
README = (REPO / "README.md").read_text()
ARCHITECTURE = (REPO / "ARCHITECTURE.md").read_text()


def example(name: str) -> str:
    """The README's Python example that stands below the comment `example: NAME`."""
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"README.md has no example {name}"
    return found[1]


@pytest.mark.parametrize("name", ["steps", "rollout"])
def test_each_example_compiles_and_imports_only_what_exists(name: str) -> None:
    code = example(name)
    compile(code, f"README:{name}", "exec")
    for module, names in re.findall(r"^from (\S+) import (.+)$", code, re.MULTILINE):
        for wanted in names.split(", "):
            assert hasattr(importlib.import_module(module), wanted), f"{module}.{wanted}"


def test_the_readmes_configuration_is_accepted_as_it_stands() -> None:
    found = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert found is not None
    config_from(tomllib.loads(found[1]))


def test_every_module_is_on_the_map() -> None:
    packages = [*(REPO / "thundersync").rglob("*.py"), *(REPO / "sandboxes").rglob("*.py")]
    modules = [path for path in packages if path.name != "__init__.py" and "starter" not in path.parts]
    missing = [
        str(path.relative_to(REPO))
        for path in [*modules, *(REPO / "tools").glob("*.py")]
        if f"`{path.name}`" not in ARCHITECTURE
    ]
    assert not missing, f"add a line to ARCHITECTURE.md for {missing}"


def test_the_map_names_no_module_that_is_gone() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE))
    there = [
        str(path.relative_to(REPO))
        for top in ("thundersync", "sandboxes", "tools")
        for path in (REPO / top).rglob("*.py")
    ]
    assert not [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)]


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_every_relative_link_leads_somewhere(document: str) -> None:
    text = (REPO / document).read_text()
    links = re.findall(r"\]\(([^)#]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    relative = [link for pair in links for link in pair if link and "://" not in link]
    assert not [link for link in relative if not (REPO / link).exists()]


def test_the_picture_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "tools"))
    script = importlib.import_module("draw_overlap")
    assert (REPO / "docs/overlap.svg").read_text() == script.draw(script.LIGHT)
    assert (REPO / "docs/overlap-dark.svg").read_text() == script.draw(script.DARK)
