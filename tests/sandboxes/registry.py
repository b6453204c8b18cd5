"""A registry that serves one small image over HTTP on this machine, which every Docker daemon may pull from."""

import gzip
import hashlib
import io
import json
import secrets
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry:
    """Serves `image`, anew with other content after `publish`."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._manifests: dict[str, bytes] = {}
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def log_message(self, *_: object) -> None:
                """Quiet."""

            def _answer(self, *, with_body: bool) -> None:
                parts = self.path.strip("/").split("/")
                kind = parts[-2] if len(parts) > 2 else ""
                found = {"manifests": registry._manifests, "blobs": registry._blobs}.get(kind, {}).get(parts[-1], b"")
                self.send_response(200 if found or self.path == "/v2/" else 404)
                self.send_header("Content-Length", str(len(found)))
                self.send_header("Content-Type", MANIFEST if kind == "manifests" else "application/octet-stream")
                if found:
                    self.send_header("Docker-Content-Digest", _digest(found))
                self.end_headers()
                if with_body:
                    self.wfile.write(found)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.name = f"127.0.0.1:{self._server.server_address[1]}/image"

    def publish(self, tag: str) -> str:
        """New content under `tag`; returns its digest."""
        layer = _layer(secrets.token_bytes(1 << 20))
        raw = gzip.compress(layer, 1)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
        blob = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _described(blob, "application/vnd.docker.container.image.v1+json"),
            "layers": [_described(raw, "application/vnd.docker.image.rootfs.diff.tar.gzip")],
        }
        text = json.dumps(manifest).encode()
        self._blobs |= {_digest(raw): raw, _digest(blob): blob}
        self._manifests |= {tag: text, _digest(text): text}
        return _digest(text)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _layer(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("content")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _described(data: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "size": len(data), "digest": _digest(data)}
