"""Which Dockerfiles need no Docker, and what they say."""

from pathlib import Path

import pytest

from sandboxes.dockerfile import Copy, Env, Instruction, Run, Workdir, load_dockerfile, parse_dockerfile
from sandboxes.errors import BuildFailed


def parse(text: str) -> list[Instruction]:
    return parse_dockerfile(f"FROM debian:12\n{text}", path="/usr/bin:/bin")


def test_the_supported_instructions_come_out_in_order() -> None:
    text = """
        # a comment
        workdir /app
        ENV A=1 B="two words"
        ENV C the rest of it
        COPY data/ notes.txt ./
        ADD ["with space.txt", "/x/"]
        RUN echo $A > a
        RUN ["python3", "-c", "print(1)"]
        USER root
    """
    assert parse(text) == [
        Workdir("/app"),
        Env({"A": "1", "B": "two words"}),
        Env({"C": "the rest of it"}),
        Copy(["data/", "notes.txt"], "./"),
        Copy(["with space.txt"], "/x/"),
        Run(["/bin/sh", "-c", "echo $A > a"]),
        Run(["python3", "-c", "print(1)"]),
    ]


def test_continuations_join_over_comments_and_empty_lines() -> None:
    text = "RUN echo a && \\\n  # why\n\n    echo b \\\n  && echo c\nWORKDIR /w"
    assert parse(text) == [Run(["/bin/sh", "-c", "echo a &&     echo b   && echo c"]), Workdir("/w")]


def test_variables_are_filled_in_but_never_inside_run() -> None:
    text = "ENV BASE=/srv NEXT=x\nENV PATH=$BASE/bin:$PATH\nWORKDIR ${BASE}/app\nCOPY a ${NONE:-b}\nRUN echo ${BASE}"
    assert parse(text) == [
        Env({"BASE": "/srv", "NEXT": "x"}),
        Env({"PATH": "/srv/bin:/usr/bin:/bin"}),
        Workdir("/srv/app"),
        Copy(["a"], "b"),
        Run(["/bin/sh", "-c", "echo ${BASE}"]),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "FROM other",
        "ARG X=1",
        "USER agent",
        "ENTRYPOINT run",
        "CMD run",
        "VOLUME /data",
        'SHELL ["bash"]',
        "HEALTHCHECK NONE",
        "ONBUILD RUN x",
        "COPY --from=builder /a /b",
        "COPY --chown=1000 a b",
        "COPY ../outside /a",
        "COPY only",
        "COPY <<EOF /a",
        "RUN <<EOF",
        "RUN cat <<'EOF' > /a",
        "RUN --mount=type=cache,target=/x true",
        "ADD https://host/file /a",
        "ADD git@host:repo /a",
        "ADD rootfs.tar.gz /",
        "ENV A='$B'",
        "ENV A=${B#x}",
        "ENV A=1 B",
        "NONSENSE",
    ],
)
def test_everything_else_is_refused_by_line_and_name(line: str) -> None:
    with pytest.raises(BuildFailed, match=r"line 3: .*needs Docker") as caught:
        parse(f"WORKDIR /x\n{line}")
    assert "docker" in caught.value.remedy


def test_a_here_string_is_no_heredoc() -> None:
    assert parse("RUN cat <<<word") == [Run(["/bin/sh", "-c", "cat <<<word"])]


@pytest.mark.parametrize("text", ["", "# nothing\n", "RUN true\nFROM x", "# escape=`\nFROM x"])
def test_what_is_no_dockerfile_is_refused(text: str) -> None:
    with pytest.raises(BuildFailed):
        parse_dockerfile(text, path="/bin")


def test_the_file_is_named_and_a_dockerignore_needs_docker(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="cannot read"):
        load_dockerfile(tmp_path, path="/bin")
    (tmp_path / "Dockerfile").write_text("FROM x\nARG y")
    with pytest.raises(BuildFailed, match=str(tmp_path)):
        load_dockerfile(tmp_path, path="/bin")
    (tmp_path / ".dockerignore").write_text("*.md")
    with pytest.raises(BuildFailed, match="dockerignore"):
        load_dockerfile(tmp_path, path="/bin")
