"""Serves the page of a run under way, to this machine only."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import document, reading

HOST = "127.0.0.1"
FILES = ("metrics.jsonl", "samples.jsonl", "timings.jsonl", "summary.json")

Version = tuple[Any, ...]


class Source:
    """The newest data of the page, read again when a file has changed."""

    def __init__(
        self, paths: Sequence[Path], *, load: Callable[[], dict[str, Any]]
    ) -> None:
        """Loads the data for the first time.

        Args:
          paths: folders of runs and sweeps.
          load: returns the data of the page from the files as they are now.
        """
        self._paths, self._load = paths, load
        self._lock = threading.Lock()
        self._last_version = self._version()
        self._data = load()
        self._number = 0

    def latest(self) -> tuple[str, dict[str, Any]]:
        """Returns a tag that changes with the data, and the data.

        While a file cannot be read, as during a write, the previous data are returned.
        """
        with self._lock:
            now = self._version()
            if now != self._last_version:
                try:
                    self._data = self._load()
                except (InputError, OSError, ValueError) as error:
                    print(f"not read again yet: {error}", file=sys.stderr)
                else:
                    self._last_version, self._number = now, self._number + 1
            return f'"{self._number}"', self._data

    def _version(self) -> Version:
        """Times and sizes of all files from which the page is made."""
        try:
            places = reading.folders(self._paths)
        except InputError:
            return ()
        files = [place / name for place in places for name in FILES]
        stats = [file.stat() for file in files if file.exists()]
        return tuple((str(place), len(stats)) for place in places) + tuple(
            (stat.st_mtime_ns, stat.st_size) for stat in stats
        )


class Server(http.server.ThreadingHTTPServer):
    """Serves the page and its data on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, source: Source, *, port: int) -> None:
        """Binds the port; 0 chooses a free one."""
        self.source = source
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise InputError(
                f"--port {port}: expected a free port, got: {error.strerror}; choose "
                f"another, or 0 for any"
            ) from error

    @property
    def address(self) -> str:
        """The address for a browser."""
        return f"http://{HOST}:{self.server_port}/"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET / and GET /data.json only."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Sends the page, or its data if they are newer than the browser's copy."""
        # Against DNS rebinding: a name of another site may point to this address.
        assert isinstance(self.server, Server)
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._send(403, "text/plain", b"not this host\n")
            return
        if self.path == "/":
            _, data = self.server.source.latest()
            self._send(200, "text/html", document.page(data, live=True).encode())
        elif self.path == "/data.json":
            tag, data = self.server.source.latest()
            if self.headers.get("If-None-Match") == tag:
                self._send(304, "application/json", b"", tag=tag)
                return
            body = json.dumps(data, allow_nan=False).encode()
            self._send(200, "application/json", body, tag=tag)
        else:
            self._send(404, "text/plain", b"not found\n")

    def _send(self, status: int, kind: str, body: bytes, *, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no requests."""
