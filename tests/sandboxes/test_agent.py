"""The agent's parts that need no sandbox; the rest is proved through real ones in test_contract."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import agent
from sandboxes.agent import Capture


@given(st.lists(st.binary(max_size=50)), st.integers(min_value=0, max_value=120))
def test_capture_keeps_head_and_tail_and_loses_count_of_nothing(pieces: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for piece in pieces:
        capture.add(piece)
    whole = b"".join(pieces)
    head = limit - limit // 2
    expected = whole if len(whole) <= limit else whole[:head] + whole[len(whole) - limit // 2 :]
    assert capture.kept() == expected
    assert capture.total == len(whole)


def test_capture_needs_no_more_memory_than_its_limit_and_a_chunk() -> None:
    capture = Capture(1000)
    for _ in range(100):
        capture.add(b"x" * agent.CHUNK)
        assert len(capture.head) + len(capture.tail) <= 1000 + agent.CHUNK


def test_the_agent_refuses_to_be_anything_but_process_1() -> None:
    # It kills every process it can see, which is the point, but only inside a sandbox.
    source = Path(agent.__file__).read_text()
    done = subprocess.run([sys.executable, "-I", "-S", "-c", source], capture_output=True, check=False, timeout=60)
    assert done.returncode == 1 and b"nowhere else" in done.stderr


def test_the_agent_fits_a_command_line_and_imports_nothing_slow() -> None:
    source = Path(agent.__file__).read_bytes()
    assert len(source) < 100_000
    for slow in ("json", "signal", "subprocess", "pathlib", "typing", "re", "tarfile"):
        assert f"\nimport {slow}\n".encode() not in source


def test_a_program_is_looked_for_as_a_shell_would(tmp_path: Path) -> None:
    for folder, mode in (("first", 0o644), ("second", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool").write_text("")
        (tmp_path / folder / "tool").chmod(mode)
    path = f"{tmp_path}/none:{tmp_path}/first:{tmp_path}/second".encode()
    assert agent.found(b"tool", {b"PATH": path}).endswith(b"/second/tool")
    assert agent.found(b"./tool", {b"PATH": path}) == b"./tool"
    with pytest.raises(FileNotFoundError, match="tool"):
        agent.found(b"tool", {b"PATH": b"/none"})
