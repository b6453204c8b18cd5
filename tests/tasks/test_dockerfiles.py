"""A Dockerfile's FROM lines are found where they are, and nothing else is taken for one."""

from thundersync.tasks.dockerfiles import find_froms, replaced

DOCKERFILE = """# FROM comment
ARG BASE=a
FROM --platform=$X ${BASE} AS One
RUN psql -c "select x \\
  FROM users"
RUN psql -c "select x \\
  # FROM comment
  FROM users" && true \\

    FROM nowhere
COPY from to
from \\
# why
  b:1 \\
  as two
RUN python3 -c "from os import path"
FROM two"""


def test_only_the_lines_that_begin_a_stage_are_found_whatever_lines_they_take() -> None:
    found = find_froms(DOCKERFILE)
    assert [(each.flags, each.base, each.name) for each in found] == [
        ("--platform=$X ", "${BASE}", "One"),
        ("", "b:1", "two"),
        ("", "two", ""),
    ]
    assert [DOCKERFILE[each.start : each.end].split()[0] for each in found] == ["FROM", "from", "FROM"]


def test_what_is_not_replaced_stays_as_it_is() -> None:
    found = find_froms(DOCKERFILE)
    changed = replaced(DOCKERFILE, found[1:], lambda each: f"<{each.base}>")
    assert changed == DOCKERFILE.replace("from \\\n# why\n  b:1 \\\n  as two", "<b:1>").replace("FROM two", "<two>")
    assert find_froms("") == []
