"""Images: pulled with progress, pinned for a run and by digest, and built ones kept within a disk budget."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes import Command, DockerRuntime, ImageMissing, Origin, SandboxSpec
from sandboxes.client import DockerClient
from sandboxes.images import ImageStore
from sandboxes.pulls import Progress
from tests.docker_daemon import BARE_IMAGE, BASE_IMAGE, DockerDaemon
from tests.sandboxes.registry import Registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry()
    yield registry
    registry.close()


def image_id(daemon: DockerDaemon, name: str) -> str:
    return daemon.docker("inspect", "-f", "{{.Id}}", name).strip()


def test_a_pull_tells_what_it_knows_of_its_layers() -> None:
    progress = Progress("image:1")
    for line in (
        {"status": "Pulling from image", "id": "1"},
        {"status": "Downloading", "id": "a", "progressDetail": {"current": 1_000_000, "total": 4_000_000}},
        {"status": "Downloading", "id": "b", "progressDetail": {"current": 2_000_000, "total": 2_000_000}},
        {"status": "Download complete", "id": "b", "progressDetail": {}},
        {"status": "Extracting", "id": "b", "progressDetail": {"current": 1, "total": 2}},
        {"status": "Already exists", "id": "c"},
    ):
        progress.see(line)
    assert progress.sentence() == "pulling image:1: 3 MB of 6 MB known so far, 1 layers done, unpacking 1"


@pytest.mark.docker
async def test_a_name_means_one_image_for_a_whole_run(docker_daemon: DockerDaemon, registry: Registry) -> None:
    said: list[str] = []
    first = registry.publish("latest")
    client = DockerClient(docker_daemon.host)
    store = ImageStore(client, say=said.append)
    spec = SandboxSpec(image=f"{registry.name}:latest")
    pinned = await store.ensure(spec)
    assert said == [f"pulling {spec.image}", f"pulled {spec.image}"]
    assert pinned == image_id(docker_daemon, spec.image)
    assert store.origin(pinned) == Origin(image=pinned, digest=f"{registry.name}@{first}")
    second = registry.publish("latest")  # somebody builds it again under the same name
    docker_daemon.docker("rmi", "-f", pinned)
    store.forget(spec)
    with pytest.raises(ImageMissing, match="another one than before"):
        await store.ensure(spec)
    by_digest = SandboxSpec(image=f"{registry.name}@{first}")
    assert await store.ensure(by_digest) == pinned
    assert await store.ensure(SandboxSpec(image=f"{registry.name}@{second}")) != pinned
    with pytest.raises(ImageMissing, match="cannot be pulled"):
        await store.ensure(SandboxSpec(image=f"{registry.name}@sha256:{'0' * 64}"))
    await client.close()


@pytest.mark.docker
async def test_an_image_that_came_from_no_registry_is_named_by_its_id(docker_daemon: DockerDaemon) -> None:
    client = DockerClient(docker_daemon.host)
    here = image_id(docker_daemon, BASE_IMAGE)
    name = BASE_IMAGE.partition(":")[0]
    assert await ImageStore(client).ensure(SandboxSpec(image=f"{BASE_IMAGE}@{here}")) == here
    with pytest.raises(ImageMissing):
        await ImageStore(client).ensure(SandboxSpec(image=f"{name}@sha256:{'1' * 64}"))
    await client.close()


@pytest.mark.docker
async def test_built_images_stay_within_their_budget_and_the_oldest_use_goes_first(
    docker_daemon: DockerDaemon, tmp_path: Path
) -> None:
    said: list[str] = []

    def context(name: str) -> SandboxSpec:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            (folder / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nCOPY data /data\n")
            (folder / "data").write_bytes(secrets.token_bytes(4 << 20))
        return SandboxSpec(context=str(folder))

    def here(wanted: str) -> bool:
        return wanted in docker_daemon.docker("images", "-q", "--no-trunc", "--filter", "label=thundersync.built")

    async def use(name: str) -> str:
        """In a run of its own."""
        client = DockerClient(docker_daemon.host)
        found = await ImageStore(client, budget_bytes=10 << 20, say=said.append).ensure(context(name))
        await client.close()
        return found

    one, two = await use("one"), await use("two")
    assert await use("one") == one  # used again: now `two` is the oldest
    three = await use("three")
    assert [here(each) for each in (one, two, three)] == [True, False, True]
    # Other tests share this daemon: what they built went first.
    assert any("built images that were used longest ago" in line for line in said)
    image_id(docker_daemon, BASE_IMAGE)  # not ours
    runtime = DockerRuntime(docker_daemon.host, images_bytes=1, say=said.append)
    await runtime.start(context("one"))
    await runtime.prepare(context("three"))  # over budget, but one is in use and the other was asked for
    assert here(one)
    built = docker_daemon.docker("images", "-q", "--no-trunc", "--filter", "label=thundersync.built").split()
    assert len(set(built)) >= 2
    assert "the budget is 0.0 GB" in said[-1]
    await runtime.close()


@pytest.mark.docker
@pytest.mark.parametrize("image", [BASE_IMAGE, BARE_IMAGE])
async def test_the_agent_may_change_what_a_dockerfile_copied_into_its_folder(
    docker_daemon: DockerDaemon, tmp_path: Path, image: str
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "file").write_text("old\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nWORKDIR /app\nCOPY app .\n")
    runtime = DockerRuntime(docker_daemon.host)
    sandbox = await runtime.start(SandboxSpec(context=str(tmp_path), workdir="/app"))
    result = await sandbox.run(Command(script="echo new > file && touch more && stat -c %U file"))
    assert (result.exit_code, result.stdout) == (0, b"agent\n"), result.stderr
    await runtime.close()
