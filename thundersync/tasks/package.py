"""A Python package as a world for repairs: its repository in one commit, pytest beside it, and a Dockerfile for both.

The first step of `tasks make-repairs`. What is written is a folder that Docker builds and process sandboxes follow, and
that needs nothing from outside: pytest and what else the tests import are copied from this installation. Refuses to
know bugs and rows.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from msgspec import Struct

from thundersync.errors import ThundersyncError

GIT_DATE = "2020-01-01T00:00:00Z"
"""Of the one commit, so that equal files have an equal id wherever they are put together."""
DOWNLOAD_LIMIT_S = 300.0
_TESTS_AND_TOOLS = re.compile(
    r"(^|/)(tests?|testing|docs?|examples?|bench(marks?)?|build|scripts|tools|\.[^/]+)/|"
    r"(^|/)(test_[^/]*|[^/]*_test|conftest|setup|noxfile|tasks|_?version)\.py$"
)
_LEFT_OUT = (".git", ".hg", ".tox", ".nox", ".venv", "venv", "__pycache__", "*.pyc", ".pytest_cache", ".mypy_cache")
_OPTIONS = "--disable-warnings --color=no --tb=no --verbose -p no:cacheprovider -o addopts="


class PackageFailed(ThundersyncError):
    """A package cannot be made a world for repairs."""


class Package(Struct, frozen=True, kw_only=True):
    """A package, ready to be built. `context` holds `Dockerfile`, `testbed/` and `pylib/`."""

    name: str
    owner: str
    """`pypi`, or `local` for a folder."""
    context: Path
    commit: str
    test_cmd: str

    @property
    def repository(self) -> Path:
        return self.context / "testbed"

    @property
    def stem(self) -> str:
        """The beginning of its tasks' ids, and the name of its folder."""
        return f"{self.owner}__{self.name}.{self.commit[:8]}"

    def sources(self) -> list[str]:
        """The package's own modules, relative to the repository, in order; not its tests."""
        found = [path.relative_to(self.repository).as_posix() for path in self.repository.rglob("*.py")]
        return sorted(path for path in found if not _TESTS_AND_TOOLS.search(path))


def make_package(package: str, out: Path, *, beside: Iterable[str], base_image: str) -> Package:
    """Write the world of `package` (a folder, or a name on the package index) into a folder below `out`.

    `beside`: installed packages that its tests import, besides pytest. For a thread: it copies, and may download.
    Raises: PackageFailed.
    """
    folder = Path(package).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as partial:
        context = Path(partial) / "context"
        if folder.is_dir():
            owner, name = "local", folder.resolve().name
            shutil.copytree(folder, context / "testbed", symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        else:
            owner, name = "pypi", re.split(r"[=<>!~\[ ]", package, maxsplit=1)[0]
            _unpack(_download(package, Path(partial)), context / "testbed")
        name = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
        commit = _commit(context / "testbed")
        for each in _with_requirements(["pytest", *beside]):
            _copy_installed(each, context / "pylib")
        (context / "Dockerfile").write_text(_dockerfile(base_image))
        paths = ["/opt/pylib", "/testbed", *(["/testbed/src"] if (context / "testbed" / "src").is_dir() else [])]
        world = Package(
            name=name,
            owner=owner,
            context=out / f"{owner}__{name}.{commit[:8]}",
            commit=commit,
            test_cmd=f"PYTHONPATH={':'.join(paths)} python3 -m pytest {_OPTIONS}",
        )
        if world.context.exists():
            shutil.rmtree(world.context)
        context.rename(world.context)
    if not world.sources():
        raise PackageFailed(f"{package} has no Python modules", remedy="Name a package whose source is Python.")
    return world


def _dockerfile(base_image: str) -> str:
    # The repository belongs to root where it is built, and git refuses other users' repositories.
    git = "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=/testbed"
    return f"FROM {base_image}\nCOPY pylib /opt/pylib\nCOPY testbed /testbed\nENV {git}\nWORKDIR /testbed\n"


def _download(package: str, folder: Path) -> Path:
    """The source distribution, through pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), package],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PackageFailed(
            f"{package} was not downloaded within {DOWNLOAD_LIMIT_S:g} s", remedy="Give the path of its source folder."
        ) from error
    found = [path for path in folder.iterdir() if path.name.endswith((".tar.gz", ".tgz", ".zip", ".tar.bz2"))]
    if done.returncode != 0 or not found:
        said = " ".join(done.stderr.split())[-500:] or "pip said nothing"
        raise PackageFailed(
            f"{package} is no folder, and its source distribution cannot be had: {said}",
            remedy="Correct the name, or give the path of its source folder.",
        )
    return found[0]


def _unpack(archive: Path, target: Path) -> None:
    """The archive's one top folder becomes `target`."""
    beside = target.with_name("unpacked")
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(beside)
        else:
            with tarfile.open(archive) as packed_tar:
                packed_tar.extractall(beside, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
        raise PackageFailed(f"{archive.name} cannot be unpacked: {error}", remedy="Give its source folder.") from error
    tops = list(beside.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise PackageFailed(f"{archive.name} does not hold one folder", remedy="Give its source folder.")
    tops[0].rename(target)
    beside.rmdir()


def _commit(repository: Path) -> str:
    """Everything in one commit, whatever a .gitignore says; its id."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "s", f"GIT_{who}_EMAIL": "s@s", f"GIT_{who}_DATE": GIT_DATE}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    said = ""
    commands = (("init", "-q", "-b", "main"), ("add", "--force", "."), ("commit", "-q", "-m", "init"))
    for arguments in (*commands, ("rev-parse", "HEAD")):
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=repository, env=env, capture_output=True, text=True, check=True
            )
        except FileNotFoundError as error:
            raise PackageFailed("git is not installed", remedy="Install git.") from error
        except subprocess.CalledProcessError as error:
            said = f"{error.stdout}{error.stderr}".strip()[-300:]
            raise PackageFailed(f"git {arguments[0]}: {said}", remedy="Give a folder that holds files.") from error
        said = done.stdout.strip()
    shutil.rmtree(repository / ".git" / "hooks", ignore_errors=True)
    return said


def _with_requirements(names: Iterable[str]) -> list[str]:
    """Installed packages and, of each, what it requires."""
    from packaging.requirements import Requirement  # comes with pytest

    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        found[key] = None
        for line in _installed(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return list(found)


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise PackageFailed(
            f"{name} is not installed here, and the tests need it in their sandbox", remedy=f"pip install {name}"
        ) from error


def _copy_installed(name: str, target: Path) -> None:
    for file in _installed(name).files or []:
        if file.parts[0].startswith("..") or "__pycache__" in file.parts or file.is_absolute():
            continue
        if file.suffix in (".so", ".pyd"):
            raise PackageFailed(
                f"{name} is not pure Python ({file.name}): it cannot be copied into sandboxes",
                remedy="Choose a package whose tests need pure Python packages only.",
            )
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(file.locate()), path)
