"""`python -m thundersync`: the commands. Each is a few lines; what they do lives elsewhere. Imports wait until needed,
so that `--help` and a wrong configuration answer at once."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="thundersync",
    help="Gradient streaming for LLM agents: each rollout's backward starts when its reward lands.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tasks = typer.Typer(name="tasks", help="Look at tasks before training on them.", no_args_is_help=True)
app.add_typer(tasks)
ConfigPath = Annotated[Path, typer.Argument(help="A TOML file, e.g. configs/quickstart.toml", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Change one setting, e.g. --set optim.lr=1e-5", metavar="KEY=VALUE")
]
Split = Annotated[str, typer.Option(help="Of data sets from the hub; train, or the only one that one has.")]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of a panel.")]


class Trainer(StrEnum):
    TRL = "trl"


class Attempter(StrEnum):
    POLICY = "policy"
    ORACLE = "oracle"
    IDLE = "idle"


@app.command()
def run(
    config: ConfigPath,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and start nothing.")] = False,
    plain: Plain = False,
) -> None:
    """Train an agent."""
    from thundersync.config_file import read_config
    from thundersync.dry_run import describe, units
    from thundersync.foreground import check
    from thundersync.session import train

    console = Console()

    def work() -> int:
        loaded = read_config(config, set_ or ())
        for note in loaded.notes:
            console.print(f"[dim]note: {note}[/]")
        if dry_run:
            console.print(describe(loaded.config), markup=False, highlight=False, soft_wrap=True)
            return 0
        console.print(units(loaded.config), markup=False, highlight=False)
        return train(loaded.config, resume=resume, plain=plain, console=console)

    raise typer.Exit(check(work, console))


@app.command()
def serve(
    config: ConfigPath,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    plain: Plain = False,
) -> None:
    """Train whatever agents come to an OpenAI-compatible endpoint: `run` with [serve], which may be left out."""
    from thundersync.config_file import read_config
    from thundersync.dry_run import units
    from thundersync.foreground import check
    from thundersync.session import train, with_endpoint

    console = Console()

    def work() -> int:
        loaded = read_config(config, set_ or ())
        for note in loaded.notes:
            console.print(f"[dim]note: {note}[/]")
        console.print(units(loaded.config), markup=False, highlight=False)
        return train(with_endpoint(loaded.config), resume=resume, plain=plain, console=console)

    raise typer.Exit(check(work, console))


@app.command(name="eval")
def evaluate(
    config: ConfigPath,
    set_: Overrides = None,
    model: Annotated[str, typer.Option(help="A checkpoint folder or any model name instead of model.name.")] = "",
    suite: Annotated[
        list[str] | None,
        typer.Option(help="Tasks instead of [eval.env]: a path, a data set's id, starter/eval; may be repeated."),
    ] = None,
    split: Split = "train",
    samples: Annotated[int, typer.Option(min=0, help="Rollouts of each task; 0: eval.group_size.")] = 0,
    agent: Annotated[
        Attempter, typer.Option(help="oracle: run the reference solutions; idle: do nothing. Both need no engine.")
    ] = Attempter.POLICY,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest evaluation of this name.")] = False,
    plain: Plain = False,
) -> None:
    """Evaluate a model on held-out tasks: pass@k and mean reward with intervals, per task and per suite."""
    from thundersync.config_file import read_config
    from thundersync.foreground import check
    from thundersync.session import evaluate_once

    console = Console()
    overrides = [*(set_ or ()), *([f"model.name={model}"] if model else [])]

    def work() -> int:
        loaded = read_config(config, overrides).config
        return evaluate_once(
            loaded,
            suites=suite or (),
            split=split,
            samples=samples,
            agent=agent.value,
            resume=resume,
            plain=plain,
            console=console,
        )

    raise typer.Exit(check(work, console))


@app.command()
def verify(
    config: ConfigPath,
    set_: Overrides = None,
    groups: Annotated[int, typer.Option(min=1, help="Most groups of the recorded step.")] = 2,
    size: Annotated[int, typer.Option(min=1, help="Most rollouts of each.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Also write what was found to this file.", metavar="FILE")] = None,
) -> None:
    """Compare streamed gradients with the one-piece gradient on rollouts of this configuration; commits nothing."""
    from thundersync.config_file import read_config
    from thundersync.foreground import check
    from thundersync.session import verify_once

    console = Console()

    def work() -> int:
        loaded = read_config(config, set_ or ()).config
        return verify_once(loaded, groups=groups, size=size, json=json, console=console)

    raise typer.Exit(check(work, console))


@app.command()
def bench(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file, e.g. configs/bench-balanced.toml", metavar="CONFIG")
    ] = None,
    set_: Overrides = None,
    json: Annotated[Path | None, typer.Option(help="Also write what was found to this file.", metavar="FILE")] = None,
    chart: Annotated[Path | None, typer.Option(help="Also draw it to this file, as SVG.", metavar="FILE")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Also write the workload to this file, to be replayed.", metavar="FILE")
    ] = None,
    against: Annotated[
        Trainer | None,
        typer.Option(help="Instead: another trainer's step beside ours, on CPUs; CONFIG may be left out."),
    ] = None,
    trl_python: Annotated[
        Path | None, typer.Option(help="The Python of an environment with trl and datasets.", metavar="FILE")
    ] = None,
) -> None:
    """Measure streamed, grouped and lazy steps on one replayed workload, side by side; keeps no weights."""
    from thundersync.bench.against.command import WORK, bench_against
    from thundersync.bench.command import bench_once
    from thundersync.config_file import read_config
    from thundersync.foreground import check

    console = Console()
    if against is None and (config is None or trl_python is not None):
        raise typer.BadParameter("give a CONFIG, or --against trl with its --trl-python")
    if against is not None and (chart is not None or record is not None):
        raise typer.BadParameter("--chart and --record are of arms of ours, and go without --against")

    def work() -> int:
        loaded = read_config(config or WORK, set_ or (), own_tasks=True).config
        if against is not None:
            return bench_against(loaded, trl_python=trl_python, json_file=json, console=console)
        return bench_once(loaded, json=json, picture=chart, record=record, console=console)

    raise typer.Exit(check(work, console))


@app.command()
def monitor(
    target: Annotated[str, typer.Argument(help="A run's folder, or the address of its feed.", metavar="RUN|ENDPOINT")],
    plain: Plain = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event, for pipes.")] = False,
    keys: Annotated[
        Path | None, typer.Option(help="A viewer's folder of keys, for a run on another machine.", metavar="DIR")
    ] = None,
) -> None:
    """Watch a run, live or finished, from any terminal or machine."""
    from thundersync.foreground import check, run_to_the_end
    from thundersync.monitor.command import look

    console = Console()

    def work() -> int:
        looking = look(target, plain=plain, json=json, keys=keys, console=console)
        return run_to_the_end(looking, console, farewell="closing the view")

    raise typer.Exit(check(work, console))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where the keys go.", metavar="DIR")],
    viewer: Annotated[str, typer.Option(help="Whose keys; one name for each who watches.")] = "viewer",
) -> None:
    """Make the keys with which a run can be watched from other machines."""
    from thundersync.foreground import check
    from thundersync.monitor.command import make

    console = Console()
    raise typer.Exit(check(lambda: make(folder, viewer, console), console))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="The folders of one or several runs.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option(help="Where the page goes; else into the first run's folder.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of a page: a trace for Perfetto, of one run.", metavar="FILE")
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A step to trace, or to show whatever else is left out, from 1; may be repeated."),
    ] = None,
) -> None:
    """Write a run, or several side by side, as one HTML page; or a step as a trace."""
    from thundersync.foreground import check
    from thundersync.report.command import report_or_trace

    console = Console()

    def work() -> int:
        said = report_or_trace(runs, out=out, trace=trace, steps=step or ())
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        return 0

    raise typer.Exit(check(work, console))


@tasks.command(name="check")
def check_tasks(
    path: Annotated[str, typer.Argument(help="Task folders, a file of rows, or a folder of several sets.")],
    runtime: Annotated[str, typer.Option(help="auto, docker or process.")] = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
    json: Annotated[
        Path | None, typer.Option(help="Report, one JSON object a line; what it holds is not checked again.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Check again what the report says is not good.")] = False,
    network: Annotated[str, typer.Option(help="task: as each task asks; off: none for any.")] = "task",
    stand_in: Annotated[
        str, typer.Option(help="A local image in the place of every base image.", metavar="IMAGE")
    ] = "",
    bake_tools: Annotated[
        bool, typer.Option("--bake-tools", help="Put what checkers install with uv into the images (env.bake_tools).")
    ] = False,
    split: Split = "train",
) -> None:
    """Say of each task whether it can be trained on: complete, built, solved by its solution, and by nothing else."""
    from thundersync.foreground import check, run_to_the_end
    from thundersync.tasks.command import check_all

    console = Console()
    bad: list[str] = []
    work = check_all(
        path,
        runtime=runtime,
        docker_host=os.environ.get("DOCKER_HOST", ""),
        jobs=jobs,
        json=json,
        again=again,
        network=network,
        stand_in=stand_in,
        bake_tools=bake_tools,
        split=split,
        variables=os.environ,
        console=console,
        bad=bad,
    )
    code = check(
        lambda: run_to_the_end(work, console, farewell="ending the check; its report can be continued"), console
    )
    raise typer.Exit(code or int(bool(bad)))


@tasks.command(name="make-repairs")
def make_repairs(
    packages: Annotated[list[str], typer.Argument(help="Source folders, or names on PyPI.", metavar="PACKAGE...")],
    out: Annotated[Path, typer.Option(help="Folder for the rows, and for what they start from.", metavar="DIR")],
    count: Annotated[int, typer.Option(min=1, help="Repairs of each package, if it has so many.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Which bugs are tried first.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Bugs at a time.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one run of the tests.")] = 120.0,
    with_: Annotated[
        list[str] | None, typer.Option("--with", help="An installed package that the tests import.", metavar="NAME")
    ] = None,
    runtime: Annotated[str, typer.Option(help="auto, docker or process.")] = "auto",
    base_image: Annotated[
        str, typer.Option(help="For Docker: an image with bash, git and python3.", metavar="IMAGE")
    ] = "python:3.11",
) -> None:
    """Make repair tasks of a small Python package and its tests: rows in SWE-smith's format."""
    from thundersync.foreground import check, run_to_the_end
    from thundersync.tasks.make_command import make_all

    console = Console()

    async def work() -> None:
        await make_all(
            packages,
            out,
            count=count,
            seed=seed,
            jobs=jobs,
            timeout_s=timeout,
            beside=with_ or (),
            runtime=runtime,
            docker_host=os.environ.get("DOCKER_HOST", ""),
            base_image=base_image,
            console=console,
        )

    farewell = "ending; what was tried is kept"
    raise typer.Exit(check(lambda: run_to_the_end(work(), console, farewell=farewell), console))


@app.command()
def plan(
    target: Annotated[Path, typer.Argument(help="A TOML file or a run's folder.", metavar="CONFIG|RUN")],
    json: Annotated[Path | None, typer.Option(help="Also write what was found to this file.", metavar="FILE")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw a step, lazy and streamed, as SVG.", metavar="FILE")
    ] = None,
) -> None:
    """Say what a run's steps would take under another order or split of devices, and the memory it needs."""
    from thundersync.foreground import check
    from thundersync.plan.command import plan

    console = Console()
    work = lambda: plan(target, json=json, picture=picture, variables=os.environ, console=console)  # noqa: E731
    raise typer.Exit(check(work, console))


@app.command()
def doctor() -> None:
    """Say what is installed here and what is missing, each with a remedy."""
    from thundersync.doctor import checks, render

    found = checks(docker_host=os.environ.get("DOCKER_HOST", ""))
    Console().print(render(found))
    raise typer.Exit(1 if any(each.state == "fail" for each in found) else 0)


def main() -> None:
    """The console script."""
    # Before anything imports torch: the coordinator computes nothing, and engines are forked safely only while torch
    # has one thread. Trainer workers get a number of threads of their own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app()


if __name__ == "__main__":
    main()
