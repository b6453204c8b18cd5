"""The table says what was found; a way that is not exact is an error."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from thundersync.errors import ConfigError, ExactnessLost
from thundersync.verify.findings import Finding, Proof, Reference
from thundersync.verify.report import refuse_inexact, table, write_json

GOOD = Finding(
    path="streamed", order="as they came", relative_l2=7.8e-6, worst=4.4e-5, worst_name="layers.0.norm", tolerance=3e-5,
    same_bits=None, ok=True, passes=8, parts=4, seconds=1.0,
)  # fmt: skip
AGAIN = msgspec.structs.replace(GOOD, order="the same again", same_bits=True)
BAD = msgspec.structs.replace(GOOD, path="spilled parts", relative_l2=2.5e-3, worst=0.5, worst_name="lm_head", ok=False)
OTHER = msgspec.structs.replace(AGAIN, same_bits=False, ok=False)


def proof(*findings: Finding) -> Proof:
    return Proof(
        objective="grpo: A = r - mean(group)",
        trains="every weight",
        dtype="float32",
        workers=2,
        groups=2,
        rollouts=8,
        tokens=219,
        references=[Reference(norm=4.4, seconds=3.0, floor=8e-6, worst=5e-5)],
        notes=["rewards of 1 flat group were replaced"],
        findings=list(findings),
        ok=all(finding.ok for finding in findings),
    )


def printed(shown: Proof) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_fits_a_plain_terminal_and_has_every_fact() -> None:
    text = printed(proof(GOOD, AGAIN, BAD))
    rows = [line.split() for line in text.splitlines()]
    assert ["streamed", "as", "they", "came", "7.8e-06", "4.4e-05", "3.0e-05", "exact"] in rows
    assert ["streamed", "the", "same", "again", "7.8e-06", "4.4e-05", "3.0e-05", "same", "bits"] in rows
    assert ["spilled", "parts", "as", "they", "came", "2.5e-03", "5.0e-01", "3.0e-05", "NOT", "EXACT"] in rows
    for fact in ("grpo: A = r - mean(group)", "2 trainer workers", "8.0e-06", "lm_head", "flat group were replaced"):
        assert fact in " ".join(text.split())


def test_a_way_that_is_not_exact_is_an_error_that_names_it() -> None:
    refuse_inexact(proof(GOOD, AGAIN))
    with pytest.raises(ExactnessLost, match=r"1 of 2 ways .* spilled parts \(1\); at worst 2.5e-03 .* lm_head"):
        refuse_inexact(proof(GOOD, BAD))


def test_other_bits_in_the_same_order_are_an_error() -> None:
    assert "other bits" in printed(proof(GOOD, OTHER))
    with pytest.raises(ExactnessLost):
        refuse_inexact(proof(GOOD, OTHER))


def test_programs_get_everything_as_json(tmp_path: Path) -> None:
    write_json(proof(GOOD, BAD), tmp_path / "proof.json")
    read = json.loads((tmp_path / "proof.json").read_text())
    assert read["ok"] is False
    assert [finding["path"] for finding in read["findings"]] == ["streamed", "spilled parts"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(proof(GOOD), tmp_path / "missing" / "proof.json")
