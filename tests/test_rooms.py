"""Imports point one way, and heavy libraries stay in the rooms that own them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
OWNERS = {
    # bench/against/arm.py is a process of another trainer, which has them itself.
    "torch": ("thundersync/learn/", "thundersync/generate/", "thundersync/bench/against/arm.py"),
    "transformers": (
        "thundersync/learn/",
        "thundersync/generate/",
        "thundersync/rollout/dialogue.py",
        "thundersync/bench/against/arm.py",
    ),
    "vllm": ("thundersync/generate/vllm",),
    "zmq": (
        "thundersync/learn/link.py",
        "thundersync/learn/worker.py",
        "thundersync/monitor/",
        "thundersync/generate/",
    ),
    "aiodocker": ("sandboxes/",),
    "textual": ("thundersync/monitor/app/",),
    "rich": (
        "thundersync/monitor/",
        "thundersync/doctor/",
        "thundersync/foreground.py",
        "thundersync/session.py",
        "thundersync/verify/report.py",
        "thundersync/bench/report.py",
        "thundersync/evaluate/tables.py",
        "thundersync/bench/command.py",
        "thundersync/bench/against/command.py",
        "thundersync/tasks/command.py",
        "thundersync/tasks/make_command.py",
        "thundersync/tasks/report.py",
        "thundersync/plan/command.py",
        "thundersync/plan/report.py",
        "thundersync/__main__.py",
    ),
}


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


SOURCES = [p for top in ("thundersync", "sandboxes") for p in (REPO / top).rglob("*.py") if "starter" not in p.parts]


@pytest.mark.parametrize("library", OWNERS)
def test_a_heavy_library_is_imported_only_in_its_rooms(library: str) -> None:
    strangers = [
        name
        for path in SOURCES
        if not (name := str(path.relative_to(REPO))).startswith(OWNERS[library])
        and any(module == library or module.startswith(f"{library}.") for module in imports(path))
    ]
    assert strangers == []


def test_the_core_imports_only_itself_and_the_errors() -> None:
    for path in (REPO / "thundersync" / "core").glob("*.py"):
        own = {m for m in imports(path) if m.startswith(("thundersync", "sandboxes"))}
        assert all(m.startswith("thundersync.core") or m == "thundersync.errors" for m in own), path
        assert not imports(path) & {"asyncio", "time", "logging", "structlog", "os"}, path


def test_the_forecast_knows_values_only() -> None:
    allowed = ("thundersync.core", "thundersync.forecast", "thundersync.monitor.events", "thundersync.errors")
    for path in (REPO / "thundersync" / "forecast").glob("*.py"):
        found = imports(path)
        assert all(m.startswith(allowed) for m in found if m.startswith(("thundersync", "sandboxes"))), path
        assert not found & {"asyncio", "time", "logging", "structlog", "os", "pathlib", "numpy", "psutil"}, path


def test_sandboxes_know_nothing_of_training() -> None:
    for path in (REPO / "sandboxes").glob("*.py"):
        assert not any(module.startswith("thundersync") for module in imports(path)), path


ROOMS = ("tasks", "rollout", "generate", "score", "learn", "monitor")


def rooms_of(path: Path) -> set[str]:
    """The rooms a file imports from."""
    return {m.split(".")[1] for m in imports(path) if m.startswith("thundersync.") and m.split(".")[1] in ROOMS}


def test_a_room_joins_few_others() -> None:
    for path in SOURCES:
        name = str(path.relative_to(REPO))
        if name.count("/") < 2 or not name.startswith("thundersync/"):
            continue  # modules at the top join rooms
        other = rooms_of(path) - {name.split("/")[1]}
        assert len(other) <= 3, (name, other)


def test_only_the_assembly_imports_every_room() -> None:
    assert [path.name for path in SOURCES if rooms_of(path) == set(ROOMS)] == ["assembly.py"]


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, thundersync\n"
        "assert not {'torch', 'vllm', 'transformers', 'zmq', 'aiodocker', 'rich'} & set(sys.modules)\n"
        "import thundersync.engine\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, timeout=60)


def test_a_monitor_loads_nothing_of_a_run() -> None:
    """It starts on the run's own cores, as often as somebody likes to look."""
    command = [sys.executable, "-X", "importtime", "-m", "thundersync", "monitor", "/nowhere", "--json"]
    told = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert "no run at" in told.stdout
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "thundersync.monitor.client" in loaded
    assert not {"thundersync.engine", "sandboxes", "aiohttp", "textual"} & loaded
