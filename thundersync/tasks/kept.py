"""Checkers and solutions that come as text in a row, kept as files: the rest of the program knows paths only.

Named by their content, so that a second load finds them, and two data sets share what is equal.
"""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs


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
        folder = (self._root / digest.hexdigest()[:2] / digest.hexdigest()[2:40]).absolute()
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
            for name, text in files.items():
                path = partial / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_bytes(text))
            partial.chmod(0o755)
            try:
                os.rename(partial, folder)  # noqa: PTH104 - atomic; an equal folder made meanwhile serves as well
            except OSError:
                if not folder.is_dir():
                    raise
                for path in sorted(partial.rglob("*"), reverse=True):
                    path.unlink() if path.is_file() else path.rmdir()
                partial.rmdir()
        return folder


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
