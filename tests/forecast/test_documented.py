"""The example in docs/performance.md takes what its comments say."""

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


def test_the_documented_step_takes_what_is_written_beside_it() -> None:
    found = re.search(r"```python\n(from thundersync.forecast .*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    *_, lazy, stream, least = found[1].strip().splitlines()
    names: dict[str, Any] = {}
    exec(found[1], names)
    for line in (lazy, stream, least):
        expression, _, told = line.partition("#")
        assert eval(expression.strip(), names) == float(re.findall(r"[\d.]+", told)[0].rstrip("."))
