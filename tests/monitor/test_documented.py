"""docs/monitor.md says what is true: its client runs, its list of events is the vocabulary, its pictures are there."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from tests.monitor.fake_run import fake_run
from thundersync.monitor import events as e
from thundersync.monitor.app.known import VIEWS
from thundersync.monitor.feed import Feed
from thundersync.rundir import RunFolder

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitor.md"
TEXT = DOCUMENT.read_text()
STREAM = list(fake_run(steps=1, groups=1, size=2))


def table() -> str:
    """Every kind with its fields, as the document has it between its marks."""
    rows = ["| kind | fields |", "|---|---|"]
    for kind in get_args(e.AnyEvent):
        fields = [f"`{field}`" for field in kind.__struct_fields__ if field != "at_s"]
        rows.append(f"| `{kind.__struct_config__.tag}` | {', '.join(fields)} |")
    return "\n".join(rows)


def started(code: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-uc", code], cwd=folder, stdout=subprocess.PIPE, text=True)


def test_the_list_of_events_is_the_vocabulary() -> None:
    found = re.search(r"<!-- events -->\n(.*?)\n?<!-- /events -->", TEXT, re.DOTALL)
    assert found is not None
    assert found[1] == table(), f"put this between the marks of docs/monitor.md:\n{table()}"
    assert f"<!-- schema -->{e.SCHEMA}<!-- /schema -->" in TEXT


async def test_the_client_of_ten_lines_hears_a_run(tmp_path: Path) -> None:
    found = re.search(r"<!-- example: client -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    code = found[1]
    assert len([line for line in code.splitlines() if line]) <= 13  # ten statements
    async with RunFolder.create(tmp_path, "run", "", False) as run, Feed.open(run.path) as feed:
        for event in STREAM[:20]:
            feed.emit(event)
        client = started(code, run.path)
        assert client.stdout is not None
        try:
            first = await asyncio.to_thread(client.stdout.readline)
            for event in STREAM[20:]:
                feed.emit(event)
            await feed.close()
            # Not communicate(): it would miss what readline has read ahead.
            rest = await asyncio.wait_for(asyncio.to_thread(client.stdout.read), 60)
        finally:
            client.kill()
            client.wait(timeout=30)
    kinds = [line.split()[1] for line in [first, *rest.splitlines()]]
    assert kinds[0] == "run_started" and kinds[-1] == "run_finished"
    assert kinds[-len(STREAM[20:]) :] == [str(type(event).__struct_config__.tag) for event in STREAM[20:]]


def test_every_view_and_picture_is_there() -> None:
    for index, view in enumerate(VIEWS):
        assert f"| `{index + 1}` | {view} |" in TEXT
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT):
        assert (DOCUMENT.parent / picture).is_file()
    config = re.search(r"```toml\n\[monitor\]\n(.*?)```", TEXT, re.DOTALL)
    assert config is not None and 'keys = "KEYS/run"' in config[1]
