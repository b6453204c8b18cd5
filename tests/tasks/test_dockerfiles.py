"""A Dockerfile's FROM lines are found where they are, and nothing else is taken for one."""

import pytest

from thundersync.tasks.dockerfiles import find_froms, replaced, takes

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


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("COPY . /app", True),
        ("copy --chown=1:1 \\\n  ./ /app", True),
        ('ADD ["a", "./", "/app"]', True),
        ('COPY "." /app', True),
        ("ONBUILD COPY / /app", True),
        ("COPY a/.. /app", True),
        ("COPY a * /app/", True),
        ("COPY n*/b /app/", True),
        ("COPY /name/b c /app/", True),
        ("COPY $WHAT /app/", True),
        ("COPY a name /app/", True),
        ("COPY a b /name/", False),
        ("COPY a/* /app/", False),
        ("COPY --from=two . /app", False),
        ("RUN COPY . /app", False),
        ("ADD https://host/name /app", False),
    ],
)
def test_what_a_copy_may_take_of_the_build_folder(line: str, taken: bool) -> None:
    assert takes(f"FROM a\n{line}\nRUN x\n", "name") == taken
