"""`python -m thundersync`: the commands. Each is a few lines; what they do lives elsewhere. Imports wait until needed,
so that `--help` and a wrong configuration answer at once."""

from __future__ import annotations

import os
import sys
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
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of a panel.")]


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
    from thundersync.session import check, train

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


@app.command(name="eval")
def evaluate(
    config: ConfigPath,
    set_: Overrides = None,
    model: Annotated[str, typer.Option(help="A checkpoint folder or any model name instead of model.name.")] = "",
    plain: Plain = False,
) -> None:
    """Evaluate a model on the [eval] tasks."""
    from thundersync.config_file import read_config
    from thundersync.session import check, evaluate_once

    console = Console()
    overrides = [*(set_ or ()), *([f"model.name={model}"] if model else [])]
    work = lambda: evaluate_once(read_config(config, overrides).config, plain=plain, console=console)  # noqa: E731
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
    from thundersync.session import check, verify_once

    console = Console()

    def work() -> int:
        loaded = read_config(config, set_ or ()).config
        return verify_once(loaded, groups=groups, size=size, json=json, console=console)

    raise typer.Exit(check(work, console))


@app.command()
def monitor(
    target: Annotated[str, typer.Argument(help="A run's folder, or the address of its feed.", metavar="RUN|ENDPOINT")],
    plain: Plain = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event, for pipes.")] = False,
) -> None:
    """Watch a run, live or finished, from any terminal."""
    from thundersync.monitor.view import pipe, show
    from thundersync.session import check, run_to_the_end

    console = Console()

    async def work() -> None:
        if json:
            await pipe(target, sys.stdout)
        else:
            await show(target, plain=plain, console=console)

    raise typer.Exit(check(lambda: run_to_the_end(work(), console, farewell="closing the view"), console))


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
) -> None:
    """Say of each task whether it can be trained on: complete, built, solved by its solution, and by nothing else."""
    from thundersync.session import check, run_to_the_end
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
        variables=os.environ,
        console=console,
        bad=bad,
    )
    code = check(
        lambda: run_to_the_end(work, console, farewell="ending the check; its report can be continued"), console
    )
    raise typer.Exit(code or int(bool(bad)))


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
