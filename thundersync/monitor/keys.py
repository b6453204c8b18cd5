"""Keys for watching a run from another machine: made, read, and told apart when they are not the right ones.

ZeroMQ's CURVE: each side has a secret key and knows the other's public one; both are certificate files of `zmq.auth`.
`keys DIR` makes two folders: `DIR/run` stays where the run is (its secret, and the public key of each viewer),
`DIR/viewer` goes to who watches (its own secret, and the run's public key). Knows nothing of events.
"""

from __future__ import annotations

import re
from pathlib import Path

import zmq
import zmq.auth
from msgspec import Struct

from thundersync.errors import ConfigError

RUN, VIEWERS = "run", "viewers"


class KeyPair(Struct, frozen=True, kw_only=True):
    """Z85 text, 40 characters each."""

    public: bytes
    secret: bytes


class RunKeys(Struct, frozen=True, kw_only=True):
    """What the run's side needs."""

    own: KeyPair
    viewers: frozenset[bytes]
    """Public keys that may watch."""


class ViewerKeys(Struct, frozen=True, kw_only=True):
    """What a viewer needs."""

    own: KeyPair
    run: bytes
    """The run's public key."""


class KeysFailed(ConfigError):
    """Key files are missing, unreadable, or open to others."""


def make_keys(folder: Path, viewer: str = "viewer") -> tuple[Path, Path]:
    """Make the run's folder in `folder`, if it has none, and one for a new `viewer`; returns both.

    Folders are only for their owner, secret files too. Raises: KeysFailed where the viewer's keys exist already, or
    nothing can be written.
    """
    if viewer in (RUN, VIEWERS) or not re.fullmatch(r"[\w.-]+", viewer) or viewer.startswith("."):
        raise KeysFailed(f"{viewer!r} cannot name a viewer", remedy="Use letters, digits, dots and dashes.")
    run, own = folder / RUN, folder / viewer
    if own.exists():
        raise KeysFailed(
            f"{own} exists already", remedy="Choose another name with --viewer, or remove the folder to make new keys."
        )
    try:
        if not (run / f"{RUN}.key_secret").exists():
            _write(run, RUN)
        (run / VIEWERS).mkdir(mode=0o700, exist_ok=True)
        public = _write(own, viewer)
        (run / VIEWERS / f"{viewer}.key").write_bytes(public.read_bytes())
        (own / f"{RUN}.key").write_bytes((run / f"{RUN}.key").read_bytes())
        public.unlink()  # the secret file holds it too
    except OSError as error:
        raise KeysFailed(f"keys cannot be made in {folder}: {error}", remedy="Choose another folder.") from error
    return run, own


def _write(folder: Path, name: str) -> Path:
    """A new pair in a folder that nobody else can enter; returns the public file."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)  # before the secret exists
    public, secret = zmq.auth.create_certificates(folder, name)
    Path(secret).chmod(0o600)
    return Path(public)


def run_keys(folder: Path) -> RunKeys:
    """The run's side (`monitor.keys`). Raises: KeysFailed."""
    own = _secret(folder, f"{RUN}.key_secret", side="the run's")
    viewers = frozenset(_public(path) for path in sorted((folder / VIEWERS).glob("*.key")))
    if not viewers:
        raise KeysFailed(
            f"{folder / VIEWERS} holds no viewer's key: nobody could watch",
            remedy=f"Make one with `python -m thundersync keys {folder.parent}`.",
        )
    return RunKeys(own=own, viewers=viewers)


def viewer_keys(folder: Path) -> ViewerKeys:
    """A viewer's side (`--keys`). Raises: KeysFailed."""
    secrets = [path.name for path in sorted(folder.glob("*.key_secret")) if path.name != f"{RUN}.key_secret"]
    if not secrets:
        hint = f"; did you mean {folder / 'viewer'}?" if (folder / "viewer").is_dir() else ""
        raise KeysFailed(
            f"{folder} holds no viewer's secret key{hint}",
            remedy="Give the folder that `python -m thundersync keys DIR` made for a viewer, copied to this machine.",
        )
    own = _secret(folder, secrets[0], side="a viewer's")
    return ViewerKeys(own=own, run=_public(folder / f"{RUN}.key"))


def _secret(folder: Path, name: str, *, side: str) -> KeyPair:
    path = folder / name
    if path.is_file() and path.stat().st_mode & 0o077:
        raise KeysFailed(
            f"{path} can be read by others, so it is no secret", remedy=f"chmod 600 {path}; better, make new keys."
        )
    public, secret = _certificate(path, side=side)
    if secret is None:
        raise KeysFailed(f"{path} holds no secret key", remedy=f"Give the folder with {side} keys.")
    return KeyPair(public=public, secret=secret)


def _public(path: Path) -> bytes:
    return _certificate(path, side="the other side's")[0]


def _certificate(path: Path, *, side: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeysFailed(
            f"{path}, {side} key, cannot be read: {'there is no such file' if not path.exists() else error}",
            remedy="Make keys with `python -m thundersync keys DIR`; the run takes DIR/run, a viewer DIR/viewer.",
        ) from error
    for key in (public, secret):  # Z85 of 32 bytes
        if key is not None and (len(key) != 40):
            raise KeysFailed(f"{path} holds a broken key", remedy="Make new keys.")
    return public, secret
