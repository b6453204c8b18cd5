"""The documentation site: every page is reachable, every link leads somewhere, and what is generated is up to date."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parent.parent
DOCS = REPO / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def nav_pages(entries: Any) -> Iterator[str]:
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, str):
            yield value
        else:
            yield from nav_pages(value)


def anchors(page: Path) -> set[str]:
    """What a page's headings can be linked by, as Markdown's table of contents names them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading) for heading in headings]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((REPO / "mkdocs.yml").read_text())["nav"]
    assert sorted(nav_pages(nav)) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_internal_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert DOCS in target.resolve().parents, f"{page.name}: {link} leads out of the site"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_ours_that_is_shown_exists(page: Path) -> None:
    from thundersync.__main__ import app

    known = {command.name or str(command.callback.__name__) for command in app.registered_commands if command.callback}
    known |= {str(group.typer_instance.info.name) for group in app.registered_groups if group.typer_instance}
    shown = re.findall(r"-m thundersync ([a-z]\w*)|^thundersync ([a-z]\w*)", page.read_text(), re.MULTILINE)
    assert {one or other for one, other in shown} <= known


def test_the_configuration_reference_is_what_the_structs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "tools"))
    made = importlib.import_module("config_reference").page()
    assert (DOCS / "config.md").read_text() == made, "run python tools/config_reference.py"


def test_every_key_says_what_it_means() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", (DOCS / "config.md").read_text(), re.MULTILINE)
    assert rows and not [key for key, meaning in rows if not meaning.strip()]


def test_the_toml_of_the_pages_is_toml() -> None:
    import tomllib

    for page in PAGES:
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
            tomllib.loads(block)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'thundersync[docs]'")
    assert shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is not None
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert len(pages) == len(PAGES)
    outside = re.findall(
        r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', (tmp_path / "site/index.html").read_text()
    )
    assert outside == []  # nothing is fetched from elsewhere
