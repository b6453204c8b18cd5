"""Entries (see sandboxes.tree) as a tar archive and back, for sandboxes that have only `tar`. Writes no file."""

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Sequence

from sandboxes.channel import Field
from sandboxes.errors import FileRefused, FileTooLarge
from sandboxes.tree import FIELDS_PER_ENTRY

NS = 1_000_000_000


def entries_to_tar(entries: Sequence[Field], *, owner: int) -> bytes:
    """An archive of `entries` in their order, all of them belonging to `owner`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for at in range(0, len(entries), FIELDS_PER_ENTRY):
            kind, name, mode, mtime, content = (_bytes(field) for field in entries[at : at + FIELDS_PER_ENTRY])
            member = tarfile.TarInfo(os.fsdecode(name))
            member.uid = member.gid = owner
            member.mode, member.mtime = int(mode), int(mtime) // NS
            if kind == b"d":
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            elif kind == b"l":
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(content)
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def tar_to_entries(data: bytes, *, limit_bytes: int) -> list[bytes]:
    """What an archive holds, names as they are: whoever lays them out checks them.

    Raises: FileTooLarge, FileRefused for sockets, pipes, devices and broken archives.
    """
    entries: list[bytes] = []
    left = limit_bytes
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                name = posixpath.normpath(member.name)
                if name == ".":
                    continue
                content = b""
                if member.isdir():
                    kind = b"d"
                elif member.issym():
                    kind, content = b"l", os.fsencode(member.linkname)
                elif member.isfile() or member.islnk():  # a hard link is another name of a file before it
                    file = archive.extractfile(member)
                    kind, content = b"f", file.read() if file is not None else b""
                    left -= len(content)
                    if left < 0:
                        raise FileTooLarge(f"more than {limit_bytes} bytes")
                else:
                    raise FileRefused(f"neither file, folder nor link: {name}")
                mode, mtime = b"%d" % stat.S_IMODE(member.mode), b"%d" % (int(member.mtime) * NS)
                entries += [kind, os.fsencode(name), mode, mtime, content]
    except (tarfile.TarError, KeyError) as error:
        raise FileRefused(f"the sandbox's tar gave a broken archive: {error}") from error
    return entries


def _bytes(field: Field) -> bytes:
    return field if isinstance(field, bytes) else str(field).encode()
