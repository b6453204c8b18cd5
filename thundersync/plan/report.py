"""A plan on a terminal: sentences first, then the numbers they rest on."""

from rich.console import Console
from rich.table import Table

from thundersync.forecast.memory import Item, total
from thundersync.plan.model import Memory, Model
from thundersync.plan.outlook import Outlook
from thundersync.plan.words import devices, seconds, sentences


def show_outlook(outlook: Outlook, console: Console) -> None:
    for sentence in sentences(outlook):
        console.print(f"- {sentence}", markup=False, highlight=False)
    table = Table("arm", title=f"mean step of {outlook.run}", title_justify="left")
    for column in ("forecast", "x lazy", "trainers busy", "engines busy", "worked for nothing"):
        table.add_column(column, justify="right")
    for name, arm in outlook.arms.items():
        table.add_row(
            name,
            seconds(arm.step_s),
            f"{arm.speedup:.2f}",
            f"{arm.trainer_busy:.0%}",
            f"{arm.engine_busy:.0%}",
            seconds(arm.wasted_s),
        )
    table.add_row("bound", seconds(outlook.bound_s), f"{outlook.arms['lazy'].step_s / outlook.bound_s:.2f}", "", "", "")
    console.print(table)
    if len(outlook.splits) > 1:
        console.print(_splits(outlook))


def show_memory(memory: Memory, model: Model, console: Console, *, on_gpus: bool) -> None:
    device = "GPU" if on_gpus else "process"
    text = f"{model.whole / 1e6:.1f} million parameters"
    text += f", {model.learning / 1e6:.1f} million of them learn" if model.learning != model.whole else ""
    table = Table(f"{text}", title=f"memory of each {device}", title_justify="left")
    table.add_column("trainer", justify="right")
    table.add_column("engine", justify="right")
    for item in memory.trainer:
        table.add_row(_named(item), _gib(item.size), "")
    for item in memory.engine:
        table.add_row(_named(item), "", _gib(item.size))
    table.add_section()
    table.add_row(f"on the {device}", _gib(total(memory.trainer)), _gib(total(memory.engine)), style="bold")
    if in_host := total(memory.trainer, "host"):
        table.add_row("in host memory", _gib(in_host), "")
    console.print(table)
    if memory.kv_token:
        console.print(
            f"K/V of one token: {memory.kv_token / 1024:.1f} KiB. An engine takes what its share of the memory leaves "
            "and keeps fewer rollouts at once if that is less than named above; common prefixes are kept once.",
            markup=False,
            highlight=False,
        )


def _splits(outlook: Outlook) -> Table:
    table = Table("split", title="the same devices, split otherwise", title_justify="left")
    for column in ("forecast", "trainers busy", "engines busy"):
        table.add_column(column, justify="right")
    for split in sorted(outlook.splits, key=lambda each: each.engines):
        now = (split.engines, split.trainers) == (outlook.engines, outlook.trainers)
        note = " (now)" if now else " (best)" if split is outlook.splits[0] else ""
        table.add_row(
            devices(outlook, split) + note,
            seconds(split.step_s),
            f"{split.trainer_busy:.0%}",
            f"{split.engine_busy:.0%}",
            style="bold" if now or split is outlook.splits[0] else "",
        )
    return table


def _named(item: Item) -> str:
    return item.name + (", roughly" if item.estimated else "") + (" (host memory)" if item.where == "host" else "")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
