"""Empty wheels for packages that something asks for but nothing here uses; `setup.py` hands them to pip.

The constraints files say which and why: every pin that ends in `+none` is one of them.
"""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9.]+\+none)\s*(?:[#;].*)?$", re.MULTILINE)


def build_placeholders(constraints: Path, folder: Path) -> list[str]:
    """Write one wheel for each `+none` pin of `constraints` into `folder`; returns the package names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, version in PIN.findall(constraints.read_text()):
        write_wheel(folder, name, version)
        names.append(name)
    return names


def write_wheel(folder: Path, name: str, version: str) -> Path:
    """A valid wheel with metadata and no code. The same bytes every time, so pip's cache stays true."""
    distribution = re.sub(r"[-_.]+", "_", name).lower()
    info = f"{distribution}-{version}.dist-info"
    summary = "Empty on purpose: a placeholder made by thundersync's tools/setup.py; nothing here imports it."
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: thundersync\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={digest(text)},{len(text.encode())}\n" for path, text in files.items()]
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    wheel = folder / f"{distribution}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, date_time=(2020, 1, 1, 0, 0, 0)), text)
    return wheel


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
