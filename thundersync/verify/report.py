"""A proof as a table for people, and as one JSON object for programs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thundersync.errors import ConfigError, ExactnessLost
from thundersync.rundir import write_whole
from thundersync.verify.findings import Finding, Proof
from thundersync.verify.tolerance import LEAST, TIMES_FLOOR


def table(proof: Proof) -> RenderableType:
    """Every way with its distance, and below what has to be known to read it."""
    rows = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("path", "order of arrival"):
        rows.add_column(name)
    for name in ("rel. L2", "worst", "limit"):
        rows.add_column(name, justify="right")
    rows.add_column("verdict")
    for found in proof.findings:
        numbers = (f"{found.relative_l2:.1e}", f"{found.worst:.1e}", f"{found.tolerance:.1e}")
        rows.add_row(found.path, found.order, *numbers, _verdict(found))
    title = Text.assemble(("Streamed against one-piece gradients", "bold"), f": {_what(proof)}")
    return Group(title, rows, *(Text(line, "dim") for line in _below(proof)))


def write_json(proof: Proof, path: Path) -> None:
    """Raises: ConfigError when the file cannot be written."""
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(proof), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", remedy="Give --json another file.") from error


def refuse_inexact(proof: Proof) -> None:
    """Raises: ExactnessLost naming the ways that failed."""
    wrong = [found for found in proof.findings if not found.ok]
    if wrong:
        worst = max(wrong, key=lambda found: found.relative_l2)
        ways = ", ".join(f"{path} ({count})" for path, count in Counter(found.path for found in wrong).items())
        raise ExactnessLost(
            f"{len(wrong)} of {len(proof.findings)} ways are not exact: {ways}; at worst {worst.relative_l2:.1e} "
            f"against a tolerance of {worst.tolerance:.0e}, most in {worst.worst_name}",
            remedy="Do not train with this configuration. Report it with the table and the recorded rollouts.",
        )


def _what(proof: Proof) -> str:
    workers = "1 trainer worker" if proof.workers == 1 else f"{proof.workers} trainer workers"
    return f"{proof.objective}; {proof.trains}, {proof.dtype}, {workers}"


def _below(proof: Proof) -> list[str]:
    worst = max(proof.findings, key=lambda found: found.worst)
    norms = " and ".join(f"{reference.norm:.3g}" for reference in proof.references)
    floors = " and ".join(f"{reference.floor:.1e}" for reference in proof.references)
    return [
        f"{proof.groups} groups, {proof.rollouts} rollouts, {proof.tokens} sampled tokens; gradient of norm {norms}",
        f"limit: {LEAST:.0e}, or {TIMES_FLOOR:g} x the rounding floor of the one-piece gradient, which is {floors}",
        f"worst: max |difference| / max |gradient| of a tensor; most in {worst.worst_name}",
        *proof.notes,
    ]


def _verdict(found: Finding) -> Text:
    if not found.ok:
        return Text("other bits" if found.relative_l2 <= found.tolerance else "NOT EXACT", "bold red")
    if found.same_bits is not None:
        return Text("same bits" if found.same_bits else "exact, other bits", "green")
    return Text("exact", "green")
