"""Finds packages that an interrupted pip left half unpacked, so that the next pip installs them again.

pip believes a package is installed as soon as its `.dist-info` has a METADATA file, and would never look again.
"""

import csv
import shutil
from pathlib import Path


def remove_half_installed(site_packages: Path) -> list[str]:
    """Delete the `.dist-info` of every package whose files are not all there; returns their names."""
    removed = []
    for info in sorted(site_packages.glob("*.dist-info")):
        if not is_whole(site_packages, info):
            shutil.rmtree(info)
            removed.append(info.name.partition("-")[0])
    return removed


def is_whole(site_packages: Path, info: Path) -> bool:
    """pip writes INSTALLER and then RECORD after the last file; each file must have the size RECORD says."""
    record = info / "RECORD"
    if not ((info / "INSTALLER").is_file() and record.is_file()):
        return False
    with record.open(newline="") as file:
        for row in csv.reader(file):
            if len(row) < 3 or not row[2] or row[0].endswith(".pyc"):
                continue  # RECORD itself has no size, and Python may write compiled files anew at any time
            try:
                size = (site_packages / row[0]).stat().st_size
            except OSError:
                return False
            if size != int(row[2]):
                return False
    return True
