"""Draws the monitor's pictures, docs/images/monitor-*.svg, from a made run: `python tools/draw_monitor.py`.

The app itself is run without a terminal, keys are pressed, and what it shows is exported.
"""

import asyncio
import re
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from thundersync.monitor.app.app import Monitor  # noqa: E402
from thundersync.monitor.app.source import Source  # noqa: E402
from tools.made_run import Shape, write_run  # noqa: E402

SHAPE = Shape(steps=8, max_steps=12, ended=False)
PICTURES = {
    "overview": ((96, 30), ["1"]),
    "overlap": ((110, 45), ["2", "left"]),
    "overlap-live": ((80, 24), ["2"]),
    "groups": ((80, 24), ["3", "down"]),
    "rollout": ((96, 30), ["3", "down", "right", "enter", "t"]),
    "engines": ((80, 24), ["5"]),
    "sandboxes": ((80, 24), ["6"]),
}


async def draw(folder: Path, size: tuple[int, int], keys: list[str]) -> str:
    """The picture after these keys, as SVG."""
    source = Source(str(folder))
    moment_s = [0.0]
    app = Monitor(source, clock=lambda: moment_s[0])
    async with app.run_test(size=size) as pilot:
        before = -1
        while app.known.heard == 0 or app.known.heard != before:  # until the whole file is read
            before = app.known.heard
            await pilot.pause(0.3)
        moment_s[0] = app.known.view.at_s
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.3)
        app.draw()
        await pilot.pause(0.3)
        app.known.heard += 1
        app.draw()
        await pilot.pause(0.1)
        return app.export_screenshot(title="python -m thundersync monitor runs/swe-8b-lora")


def main() -> None:
    images = REPO / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_run(Path(scratch) / "run", SHAPE)
        for name, (size, keys) in PICTURES.items():
            drawn = asyncio.run(draw(folder, size, keys))
            # Whoever looks has a monospaced font; nothing is to be fetched for a picture.
            drawn = re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL).replace("Fira Code", "monospace")
            (images / f"monitor-{name}.svg").write_text(drawn)


if __name__ == "__main__":
    main()
