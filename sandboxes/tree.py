"""A host folder as fields for the agent, and start states as fields it once gave back. Follows no link.

An entry is five fields: kind (`f`, `d`, `l`), path relative to the folder, mode, mtime in ns, content or link target.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandboxes.channel import Field
from sandboxes.errors import FileMissing, FileRefused, FileTooLarge

FIELDS_PER_ENTRY = 5


def pack_tree(source: Path, *, limit_bytes: int) -> list[Field]:
    """Everything below `source`, parents before children, names sorted. Blocks: call it in a thread.

    Raises: FileMissing when `source` is no folder, FileTooLarge, FileRefused for sockets, pipes and devices.
    """
    if not source.is_dir():
        raise FileMissing(f"not a folder: {source}")
    fields: list[Field] = []
    left = limit_bytes
    for path, found in _walk(source):
        packed = entry(path, os.fsencode(path.relative_to(source)), found, limit_bytes=left)
        content = packed[-1]
        left -= len(content) if isinstance(content, bytes) else 0
        fields.extend(packed)
    return fields


def entry(path: Path, name: bytes, found: os.stat_result, *, limit_bytes: int) -> list[Field]:
    """One host file, folder or link as an entry called `name`."""
    mode = stat.S_IMODE(found.st_mode) & 0o777  # no set-uid bit enters a sandbox
    if stat.S_ISDIR(found.st_mode):
        return ["d", name, mode, found.st_mtime_ns, b""]
    if stat.S_ISLNK(found.st_mode):
        return ["l", name, mode, found.st_mtime_ns, os.fsencode(path.readlink())]
    if not stat.S_ISREG(found.st_mode):
        raise FileRefused(f"neither file, folder nor link: {path}")
    if found.st_size > limit_bytes:
        raise FileTooLarge(
            f"{path} does not fit into the {limit_bytes} bytes left",
            remedy="Put large data into the sandbox's image instead of copying it into every sandbox.",
        )
    return ["f", name, mode, found.st_mtime_ns, path.read_bytes()]


def unpack_tree(entries: Sequence[bytes], target: Path) -> None:
    """Make the new folder `target` hold `entries`, which a sandbox gave and nobody trusts. Blocks: call it in a thread.

    Raises: FileRefused when `target` exists, or for a path or link that leads out of it; then nothing is left of it.
    """
    try:
        target.mkdir(parents=True)
    except FileExistsError as error:
        raise FileRefused(f"{target} exists", remedy="Name a folder that does not exist yet.") from error
    try:
        _lay_out(entries, target)
    except (OSError, ValueError) as error:
        shutil.rmtree(target)
        raise FileRefused(f"a sandbox's folder cannot be laid out in {target}: {error}") from error
    except BaseException:
        shutil.rmtree(target)
        raise


def _lay_out(entries: Sequence[bytes], target: Path) -> None:
    links: list[tuple[Path, bytes]] = []
    for at in range(0, len(entries), FIELDS_PER_ENTRY):
        kind, name, mode, mtime, content = entries[at : at + FIELDS_PER_ENTRY]
        parts = name.split(b"/")
        if not name or b"\0" in name or any(part in (b"", b".", b"..") for part in parts):
            raise FileRefused(f"a sandbox named a file outside its folder: {os.fsdecode(name)!r}")
        path = target / os.fsdecode(name)
        if kind == b"l":
            links.append((path, content))
            continue
        # No link is made before the last file is: nothing here can be led elsewhere by one.
        if kind == b"d":
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(int(mode) & 0o777)
        os.utime(path, ns=(int(mtime), int(mtime)))
    for path, _ in links:
        path.parent.mkdir(parents=True, exist_ok=True)
    for path, content in links:
        path.symlink_to(os.fsdecode(content))
    top = target.resolve()
    for path, content in links:
        # Resolved through all the links at once: each alone may look harmless. A loop is a dead end, and stays.
        if not Path(os.path.realpath(path)).is_relative_to(top):
            raise FileRefused(f"a sandbox's link leads out of its folder: {path.name} -> {os.fsdecode(content)}")


def count(fields: list[Field] | list[bytes]) -> int:
    """Entries in `fields`."""
    return len(fields) // FIELDS_PER_ENTRY


def _walk(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for child in sorted(top.iterdir()):
        found = child.lstat()
        yield child, found
        if stat.S_ISDIR(found.st_mode):
            yield from _walk(child)


def content_hash(source: Path) -> str:
    """Hex digest of names, modes and content below `source`; times do not count. Blocks: call it in a thread."""
    digest = hashlib.sha256()
    for path, found in _walk(source):
        name = os.fsencode(path.relative_to(source))
        content = b""
        if stat.S_ISREG(found.st_mode):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        elif stat.S_ISLNK(found.st_mode):
            content = os.fsencode(path.readlink())
        # Length first, so that no two different trees write the same bytes.
        digest.update(b"%d %o %d " % (len(name), found.st_mode, len(content)) + name + content)
    return digest.hexdigest()
