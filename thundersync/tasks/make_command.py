"""What `python -m thundersync tasks make-repairs` does: a world per package, its bugs tried, rows and a table."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sandboxes
from thundersync.errors import ConfigError
from thundersync.tasks.make_repairs import MEANINGS, Attempt, Journal, Made, RepairMaker
from thundersync.tasks.mutations import Mutation, in_seeded_order, mutations_of
from thundersync.tasks.package import Package, PackageFailed, make_package

RuntimeKind = Literal["auto", "docker", "process"]


async def make_all(
    packages: Sequence[str],
    out: Path,
    *,
    count: int,
    seed: int,
    jobs: int,
    timeout_s: float,
    beside: Sequence[str],
    runtime: str,
    docker_host: str,
    base_image: str,
    console: Console,
) -> list[Made]:
    """Write `out`/NAME.jsonl for each package, its world beside it; print a line for each bug and a table.

    Raises: PackageFailed, ConfigError, RuntimeUnavailable, SandboxError.
    """
    if runtime not in get_args(RuntimeKind):
        known = ", ".join(get_args(RuntimeKind))
        raise ConfigError(f"--runtime is {runtime!r}", remedy=f"Give one of: {known}.")
    chosen = await sandboxes.choose(runtime, docker_host=docker_host, box_mib=sandboxes.BOX_MIB)  # type: ignore[arg-type]  # checked above
    started_s = time.monotonic()
    found: list[Made] = []
    try:
        for package in packages:
            world = await asyncio.to_thread(make_package, package, out, beside=beside, base_image=base_image)
            candidates = await asyncio.to_thread(_candidates, world, seed)
            console.print(f"{world.stem}: {len(candidates)} bugs to try, in {chosen.name} sandboxes", highlight=False)
            journal = Journal(out / ".attempts" / f"{world.stem}.log")

            def tell(attempt: Attempt) -> None:
                name = attempt.instance_id.rpartition(".")[2]
                tests = f" {len(attempt.fail_to_pass)} fail" if attempt.state == "valid" else ""
                line = f"[dim]{attempt.seconds:6.1f} s[/] {attempt.state:9}{escape(name)}{tests}"
                console.print(line, highlight=False)

            try:
                maker = RepairMaker(chosen, journal=journal, jobs=jobs, timeout_s=timeout_s, done=tell)
                made = await maker.make(world, candidates, count=count)
            finally:
                journal.close()
            _write(out / f"{world.stem}.jsonl", made)
            found.append(made)
    finally:
        await chosen.close()
    console.print(_table(found))
    rows = sum(len(made.rows) for made in found)
    if not rows:
        raise PackageFailed(
            f"none of the bugs that were tried in {', '.join(made.world.name for made in found)} was kept",
            remedy="The table says why; give packages whose tests look at more of their code.",
        )
    said = f"{rows} repairs in {out}, {time.monotonic() - started_s:.0f} s; train on them: env.path = {str(out)!r}"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return found


def _candidates(world: Package, seed: int) -> list[Mutation]:
    """Every bug of every module of the package itself."""
    found: list[Mutation] = []
    for path in world.sources():
        found += mutations_of(path, (world.repository / path).read_bytes())
    return in_seeded_order(found, seed=seed)


def _write(path: Path, made: Made) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in made.rows))
    partial.replace(path)


def _table(found: Sequence[Made]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="dim")
    states = [state for state in MEANINGS if any(made.states.get(state) for made in found)]
    for name in ("package", "tests", "left out", "s a run", "bugs", "rows", *states):
        shown.add_column(name, justify="left" if name == "package" else "right", no_wrap=True)
    for made in found:
        shown.add_row(
            escape(made.world.stem),
            str(len(made.clean.passing)),
            str(made.clean.left_out),
            f"{made.clean.seconds:.1f}",
            str(made.candidates),
            str(len(made.rows)),
            *(str(made.states.get(state, 0)) for state in states),
        )
    return shown
