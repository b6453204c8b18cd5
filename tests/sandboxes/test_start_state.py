"""The same folder with a Dockerfile gives the same start in a box and in a container."""

import asyncio
from pathlib import Path

import pytest

from sandboxes import BuildFailed, Command, DockerRuntime, ImageMissing, ProcessRuntime, SandboxSpec, StartFailed
from sandboxes.errors import RuntimeUnavailable
from tests.docker_daemon import BASE_IMAGE
from tests.sandboxes.conftest import Lab


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A context that uses every supported instruction."""
    folder = tmp_path / "environment"
    (folder / "data" / "sub").mkdir(parents=True)
    (folder / "data" / "one.txt").write_text("one\n")
    (folder / "data" / "sub" / "two.txt").write_text("two\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "a.log").write_text("a\n")
    (folder / "b.log").write_text("b\n")
    (folder / "Dockerfile").write_text(
        f"""FROM {BASE_IMAGE}
USER root
ENV GREETING="hello there" PATH=/workspace/bin:$PATH
WORKDIR /workspace
COPY data /workspace/data
COPY data/one.txt renamed.txt
COPY run.sh bin/
COPY *.log logs/
WORKDIR deeper
RUN echo "$GREETING" > greeting && \\
    date +%N > when && ln -s ../renamed.txt link && mkdir -p /srv/made
"""
    )
    return folder


async def test_a_dockerfile_is_followed(lab: Lab, context: Path) -> None:
    sandbox = await lab.runtime.start(SandboxSpec(context=str(context)))
    script = (
        "find . -type f | sort; cat renamed.txt data/sub/two.txt deeper/greeting deeper/link; run.sh; ls -d /srv/made"
    )
    result = await sandbox.run(Command(script=script))
    assert result.stdout.decode().split("\n")[:8] == [
        "./bin/run.sh",
        "./data/one.txt",
        "./data/sub/two.txt",
        "./deeper/greeting",
        "./deeper/when",
        "./logs/a.log",
        "./logs/b.log",
        "./renamed.txt",
    ]
    assert result.stdout.endswith(b"one\ntwo\nhello there\none\nran\n/srv/made\n")
    changed = await sandbox.run(Command(script="echo more >> renamed.txt && rm -r data && echo $GREETING"))
    assert (changed.exit_code, changed.stdout) == (0, b"hello there\n")
    await sandbox.close()


async def test_the_start_state_is_built_once_and_the_same_for_all(lab: Lab, context: Path) -> None:
    spec = SandboxSpec(context=str(context))
    sandboxes = await asyncio.gather(*(lab.runtime.start(spec) for _ in range(4)))
    script = "cat /workspace/deeper/when; stat -c %Y /workspace/deeper/when; echo mine >> /workspace/renamed.txt"
    states = {(await sandbox.run(Command(script=script))).stdout for sandbox in sandboxes}
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    assert len(states) == 1
    later = await lab.runtime.start(spec)
    assert await later.read("/workspace/renamed.txt") == b"one\n"
    await later.close()


async def test_a_sandbox_says_what_it_was_made_from(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("one\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nENV A=1\nCOPY data /workspace/data\n")
    spec = SandboxSpec(context=str(tmp_path))
    one, other = await asyncio.gather(lab.runtime.start(spec), lab.runtime.start(spec))
    assert one.origin == other.origin
    assert one.origin.image.startswith("sha256:") and len(one.origin.image) == 71
    if lab.daemon is not None:
        assert one.origin.image == lab.daemon.docker("inspect", "-f", "{{.Image}}", one.sandbox_id).strip()
    else:
        assert (await lab.start()).origin.image == ""  # nothing was built
    await asyncio.gather(one.close(), other.close())


async def test_the_same_state_built_elsewhere_and_later_has_the_same_digest(lab: Lab, tmp_path: Path) -> None:
    if lab.daemon is not None:
        pytest.skip("what a Docker image's id covers is Docker's business")

    async def built(data: str, value: str) -> str:
        (tmp_path / "data").write_text(data)
        (tmp_path / "Dockerfile").write_text(f"FROM x\nENV A={value}\nCOPY data /workspace/data\n")
        runtime = ProcessRuntime()
        sandbox = await runtime.start(SandboxSpec(context=str(tmp_path)))
        await runtime.close()
        return sandbox.origin.image

    assert await built("one", "1") == await built("one", "1")
    assert len({await built(*each) for each in (("one", "1"), ("two", "1"), ("one", "2"))}) == 3


async def test_a_failing_build_tells_what_was_said(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nRUN echo some reason; exit 3\n")
    with pytest.raises(BuildFailed, match="some reason"):
        await lab.runtime.prepare(SandboxSpec(context=str(tmp_path)))


async def test_a_file_that_is_not_in_the_context_fails_the_build(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nCOPY none /workspace/\n")
    with pytest.raises(BuildFailed, match="none"):
        await lab.runtime.prepare(SandboxSpec(context=str(tmp_path)))


async def test_a_context_without_a_dockerfile_fails_the_build(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="Dockerfile"):
        await lab.runtime.prepare(SandboxSpec(context=str(tmp_path)))


async def test_a_link_out_of_the_context_is_not_followed(tmp_path: Path) -> None:
    runtime = ProcessRuntime()
    (tmp_path / "secret").write_text("secret")
    context = tmp_path / "environment"
    context.mkdir()
    (context / "link").symlink_to(tmp_path / "secret")
    (context / "Dockerfile").write_text("FROM x\nCOPY link /workspace/\n")
    with pytest.raises(BuildFailed, match="link"):
        await runtime.prepare(SandboxSpec(context=str(context)))
    await runtime.close()


async def test_a_box_that_cannot_be_what_is_asked_refuses() -> None:
    runtime = ProcessRuntime()
    with pytest.raises(ImageMissing, match="python:3"):
        await runtime.start(SandboxSpec(image="python:3"))
    with pytest.raises(RuntimeUnavailable, match="network"):
        await runtime.start(SandboxSpec(network=True))
    await runtime.close()


@pytest.mark.docker
async def test_an_image_that_is_nowhere_or_unfit_is_told_by_name(docker_host: str, tmp_path: Path) -> None:
    runtime = DockerRuntime(docker_host)
    with pytest.raises(ImageMissing, match="localhost:1/no/such:image"):
        await runtime.start(SandboxSpec(image="localhost:1/no/such:image"))
    with pytest.raises(ImageMissing):
        await runtime.start(SandboxSpec())
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nRUN rm -f /usr/bin/python3* /bin/*sh\n")
    with pytest.raises(StartFailed, match="sh"):
        await runtime.start(SandboxSpec(context=str(tmp_path)))
    await runtime.close()


@pytest.mark.parametrize(("asked_mib", "had_kib"), [(0, 8 << 10), (4096, 8 << 10), (4, 4 << 10)])
async def test_a_box_has_no_more_memory_for_files_than_the_runtime_gives(asked_mib: int, had_kib: int) -> None:
    runtime = ProcessRuntime(box_mib=8)
    box = await runtime.start(SandboxSpec(disk_mib=asked_mib))
    df = await box.run(Command(script="df -k --output=size /workspace | tail -1"))
    assert int(df.stdout) == had_kib
    await runtime.close()
