"""The official `swebench` package's reading of a log, where it is installed: resolved here is resolved there.

In a process of its own: the import takes seconds and brings a hundred modules. Refuses to know tasks and sandboxes.
"""

import asyncio
import functools
import importlib.util
import sys

import msgspec

from thundersync.score.test_logs import Status

LIMIT_S = 120.0
_PROGRAM = """
import importlib, json, pkgutil, sys
asked = json.load(sys.stdin)
import swebench.harness.log_parsers as parsers
found = getattr(parsers, "PARSER_REGISTRY", {}).get(asked["parser"]) or getattr(parsers, asked["parser"], None)
if found is None:
    for each in pkgutil.iter_modules(parsers.__path__):
        module = importlib.import_module(f"{parsers.__name__}.{each.name}")
        found = found or getattr(module, asked["parser"], None)
statuses = None if found is None else found(asked["log"], None)
print(json.dumps(statuses and {name: str(getattr(status, "value", status)) for name, status in statuses.items()}))
"""


@functools.cache
def available() -> bool:
    """Whether the official package is installed here."""
    return importlib.util.find_spec("swebench") is not None


async def official_statuses(log: str, parser: str) -> dict[str, Status] | None:
    """Statuses by test, of the text between the marks; None without the package, or a parser that it does not know."""
    if not parser.startswith("parse_log_") or not available():
        return None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, _ = await process.communicate(msgspec.json.encode({"log": log, "parser": parser}))
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return msgspec.json.decode(said.splitlines()[-1], type=dict[str, Status] | None)
    except (msgspec.DecodeError, IndexError):
        return None
