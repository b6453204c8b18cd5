"""Who may attach: the run's addresses, and the CURVE handshake of those that leave this machine.

Part of the feed. Every connection to a keyed address is asked about here (ZeroMQ's ZAP, RFC 27) and is refused unless
its public key is one of the viewers'. Knows nothing of what is then said.
"""

import contextlib
import ipaddress
import os
import shutil
import tempfile
from pathlib import Path

import zmq
from zmq.utils import z85

from thundersync.errors import ConfigError
from thundersync.monitor.keys import RunKeys

DOMAIN = b"thundersync"
ZAP = "inproc://zeromq.zap.01"
UNIX_PATH_LIMIT = 107
"""Bytes of a unix socket's path on Linux, macOS has 103: the shorter binds everywhere."""


class Gate:
    """Answers the handshakes of one context. Bind it before any keyed socket."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: RunKeys) -> None:
        self._allowed = {z85.decode(key): key for key in keys.viewers}
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP)

    def answer(self) -> None:
        """Answer every question that is here; never waits."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            split = frames.index(b"")
            version, request_id, _domain, _address, _identity, mechanism, *credentials = frames[split + 1 :]
            known = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._allowed
            verdict = (b"200", b"OK", b"viewer", b"") if known else (b"400", b"not one of the viewers' keys", b"", b"")
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart([*frames[: split + 1], version, request_id, *verdict], zmq.NOBLOCK)


def lock(publisher: "zmq.Socket[bytes]", keys: RunKeys) -> None:
    """Only viewers with one of the keys get in; everything said is encrypted. Call before binding."""
    publisher.setsockopt(zmq.CURVE_SERVER, 1)
    publisher.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    publisher.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    publisher.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate that answers nobody gets in


def bind(publisher: "zmq.Socket[bytes]", address: str) -> None:
    """Raises: ConfigError."""
    publisher.setsockopt(zmq.IPV6, int("[" in address))
    try:
        publisher.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"monitor.bind: cannot listen at {address}: {error}",
            remedy="Choose another port (`tcp://127.0.0.1:*` takes a free one), or leave monitor.bind empty.",
        ) from error


def bind_in(publisher: "zmq.Socket[bytes]", folder: Path) -> None:
    """A socket file in the run folder, or, where its path is too long for one, in a private temporary folder."""
    address, temporary = f"ipc://{folder.absolute()}/feed.sock", ""
    if not fits(address):
        temporary = tempfile.mkdtemp(prefix="thundersync-feed-")
        address = f"ipc://{temporary}/feed.sock"
    try:
        bind(publisher, address)
    except BaseException:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def fits(address: str) -> bool:
    return len(os.fsencode(address.removeprefix("ipc://"))) <= min(UNIX_PATH_LIMIT, 103)


def refuse_unsafe(address: str, *, keyed: bool) -> None:
    """An address that would show the run to other machines without keys is no address. Raises: ConfigError."""
    scheme, _, place = address.partition("://")
    host = place.rpartition(":")[0]
    if scheme == "tcp" and (keyed or is_loopback(host)):
        return
    if scheme == "tcp":
        raise ConfigError(
            f"monitor.bind = {address!r} would show the run, unencrypted, to every machine that reaches this one",
            remedy='Make keys with `python -m thundersync keys KEYS` and set monitor.keys = "KEYS/run"; or bind to '
            "tcp://127.0.0.1:5599 and watch through a tunnel: ssh -L 5599:127.0.0.1:5599 THIS_MACHINE",
        )
    if scheme != "ipc" or not fits(address):
        raise ConfigError(
            f"monitor.bind = {address!r} is neither tcp://HOST:PORT nor ipc:// with a path of at most 103 bytes",
            remedy="Leave monitor.bind empty for a socket file in the run folder.",
        )


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return host == "localhost"
