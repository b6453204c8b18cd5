"""A proof as a table for people, and as one JSON object for programs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thundersync.errors import ConfigError, ExactnessLost
from thundersync.rundir import write_whole
from thundersync.verify.proof import Finding, Proof

PER_TENSOR = 1e-3
"""Above it a tensor is marked for people to look at. No verdict: a few elements of one tensor decide its maximum."""


def table(proof: Proof) -> RenderableType:
    """Every way with its distance, and below what has to be known to read it."""
    rows = Table(title=_title(proof), title_justify="left", caption=_caption(proof), caption_justify="left")
    rows.add_column("path")
    rows.add_column("order of arrival")
    rows.add_column("relative L2", justify="right")
    rows.add_column("worst tensor", justify="right", overflow="fold")
    rows.add_column("tolerance", justify="right")
    rows.add_column("verdict")
    for found in proof.findings:
        rows.add_row(
            found.path,
            found.order,
            f"{found.relative_l2:.1e}",
            f"{found.worst:.1e} {found.worst_name}",
            f"{found.tolerance:.0e}",
            _verdict(found),
        )
    return Group(rows, *(Text(f"  {note}", "dim") for note in proof.notes))


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


def _title(proof: Proof) -> str:
    workers = "1 trainer worker" if proof.workers == 1 else f"{proof.workers} trainer workers"
    return f"Streamed against one-piece gradients. {proof.objective}; {proof.trains}, {proof.dtype}, {workers}"


def _caption(proof: Proof) -> str:
    return (
        f"{proof.groups} groups, {proof.rollouts} rollouts, {proof.tokens} sampled tokens; the one-piece gradient has "
        f"norm {proof.norm:.2g} and took {proof.reference_s:.0f} s"
    )


def _verdict(found: Finding) -> Text:
    if not found.ok:
        wrong = "other bits" if found.relative_l2 <= found.tolerance else "NOT EXACT"
        return Text(wrong, "bold red")
    if found.same_bits is not None:
        return Text("same bits" if found.same_bits else "exact, other bits", "green")
    return Text("exact", "green") if found.worst <= PER_TENSOR else Text("exact (see worst)", "yellow")
