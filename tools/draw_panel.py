"""Draws docs/panel.svg, the README's picture of the live panel, from a real run:

    python tools/draw_panel.py runs/NAME/events.jsonl [SECONDS]

The panel is shown as it was SECONDS after the run's start (default: two thirds of the way), by the monitor's own code.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from thundersync.monitor.events import from_line
from thundersync.monitor.panel import render
from thundersync.monitor.state import RunView

WIDTH, HEIGHT = 96, 26


def main(events: Path, seconds: float | None) -> None:
    known = [event for line in events.read_bytes().splitlines() if (event := from_line(line)) is not None]
    start_s, end_s = known[0].at_s, known[-1].at_s
    moment_s = start_s + (seconds if seconds is not None else (end_s - start_s) * 2 / 3)
    view = RunView()
    for event in known:
        if event.at_s <= moment_s:
            view.apply(event)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(view, now_s=moment_s, width=WIDTH, height=HEIGHT))
    picture = Path(__file__).resolve().parent.parent / "docs" / "panel.svg"
    drawn = console.export_svg(title="python -m thundersync run configs/quickstart.toml")
    # Whoever looks has a monospaced font; nothing is to be fetched for a picture.
    picture.write_text(re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL).replace("Fira Code", "monospace"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else None)
