"""What a sandbox says its folder holds is not trusted: nothing is written outside, whatever the entries claim."""

from pathlib import Path

import pytest

from sandboxes import FileRefused
from sandboxes.tree import pack_tree, unpack_tree


def entry(kind: str, name: str, content: str = "") -> list[bytes]:
    return [kind.encode(), name.encode(), b"420", b"0", content.encode()]


@pytest.mark.parametrize(
    "entries",
    [
        entry("f", "../evil", "x"),
        entry("f", "/etc/evil", "x"),
        entry("f", "a/../../evil", "x"),
        entry("f", "", "x"),
        entry("d", ".."),
        entry("f", "a\0b", "x"),
        entry("l", "a", "/etc"),
        entry("l", "a", "..") + entry("f", "a/evil", "x"),
        entry("l", "a", "..") + entry("l", "a/evil", "x"),
        entry("l", "a", "b/../..") + entry("d", "b"),
        entry("f", "a", "x") + entry("f", "a/evil", "x"),
    ],
)
def test_entries_that_lead_out_are_refused_and_nothing_is_left(tmp_path: Path, entries: list[bytes]) -> None:
    with pytest.raises(FileRefused):
        unpack_tree(entries, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_a_tree_survives_the_way_in_and_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run").write_bytes(b"\x00run")
    (source / "sub" / "run").chmod(0o755)
    (source / "link").symlink_to("sub/run")
    (source / "loop").symlink_to("loop")
    packed = [field if isinstance(field, bytes) else str(field).encode() for field in pack_tree(source, limit_bytes=99)]
    unpack_tree(packed, tmp_path / "target")
    assert pack_tree(tmp_path / "target" / "sub", limit_bytes=99) == pack_tree(source / "sub", limit_bytes=99)
    assert (tmp_path / "target" / "link").readlink() == Path("sub/run")
