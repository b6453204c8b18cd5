"""Checkers and solutions that come as text in a row, kept as files: the rest of the program knows paths only.

Named by their content, so that a second load finds them, and two data sets share what is equal.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from sandboxes.tree import content_hash


class KeptFiles:
    """A folder of folders. Safe for several processes at once."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: by default the user's cache."""
        self._root = root if root is not None else platformdirs.user_cache_path("thundersync") / "tasks"

    def keep(self, files: Mapping[str, str]) -> Path:
        """The folder that holds exactly `files` (names, with `/` for folders, to text). Absolute."""
        digest = hashlib.sha256()
        for name in sorted(files):
            data = _bytes(files[name])
            digest.update(f"{len(name)}:{name}:{len(data)}:".encode())
            digest.update(data)

        def fill(folder: Path) -> None:
            for name, text in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_bytes(text))

        folder = self._at(digest.hexdigest())
        return folder if folder.is_dir() else self._settle(self._filled(fill), folder)

    def keep_folder(self, fill: Callable[[Path], None]) -> Path:
        """The folder that holds exactly what `fill` puts into an empty one. Absolute."""
        partial = self._filled(fill)
        return self._settle(partial, self._at(content_hash(partial)))

    def _at(self, digest: str) -> Path:
        return (self._root / digest[:2] / digest[2:40]).absolute()

    def _filled(self, fill: Callable[[Path], None]) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._root))
        try:
            fill(partial)
        except BaseException:
            shutil.rmtree(partial)
            raise
        partial.chmod(0o755)
        return partial

    def _settle(self, partial: Path, folder: Path) -> Path:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(partial, folder)  # noqa: PTH104 - atomic; an equal folder made meanwhile serves as well
        except OSError:
            shutil.rmtree(partial)
            if not folder.is_dir():
                raise
        return folder


def copy_folder(source: Path, target: Path) -> None:
    """Copy what `source` holds into `target`, which may be there; links as links.

    Raises: OSError, the first one as it is: `copytree` goes on and tells of all as texts, a full disk among them.
    """

    def copy(one: str, other: str) -> None:
        try:
            shutil.copy2(one, other)
        except OSError as error:
            raise _CopyFailed(error) from error

    try:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=copy)
    except _CopyFailed as failed:
        raise failed.error from None


class _CopyFailed(Exception):
    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
