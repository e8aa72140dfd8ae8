"""What the hubs of the tests have in common: state, transport, ranges, and faults on demand.

Every request is kept in `requests`. `faults` breaks the next requests that match.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LFS_FROM_BYTES = 20_000
"""Files of this size, and weights of any, go the way of large files."""


@dataclass
class Repo:
    """What a repository holds, and what became of it."""

    private: bool = False
    licence: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)

    @property
    def sha(self) -> str:
        """The head's id; 40 digits, as git's are."""
        names = json.dumps([self.commits, sorted(self.files)])
        return hashlib.sha1(names.encode()).hexdigest()


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that match."""

    method: str
    path: str
    """A regular expression, searched in the path."""
    status: int | None = None
    """Answered instead; None cuts the connection."""
    after_bytes: int = 0
    """Of the body, before the cut."""
    times: int = 1


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    method: str
    path: str
    headers: dict[str, str]
    """Under their names in lower case."""
    body: bytes


class LocalServer:
    """A server on localhost with its state; `handler` is the protocol it speaks."""

    handler: type[Handler]

    def __init__(self) -> None:
        self.users: dict[str, str] = {}
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        bound = type("Bound", (self.handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), bound)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def asked(self, method: str, path: str) -> list[Request]:
        """The requests of a method whose path matches."""
        return [
            item for item in self.requests if item.method == method and re.search(path, item.path)
        ]

    def add(self, name: str, folder: Path, private: bool = False) -> Repo:
        """A repository with the files of a folder, as if somebody had uploaded it."""
        repo = Repo(private=private, commits=["first"])
        for item in sorted(folder.iterdir()):
            if item.is_file():
                repo.files[item.name] = item.read_bytes()
                if is_large(item.name, item.stat().st_size):
                    repo.large.add(item.name)
        self.repos[name] = repo
        return repo

    def fault_for(self, method: str, path: str) -> Fault | None:
        """The first fault that is meant for this request; it is used up."""
        with self._lock:
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None


def is_large(name: str, size: int) -> bool:
    """What the hub keeps as a large file."""
    return size >= LFS_FROM_BYTES or name.endswith((".safetensors", ".bin"))


class _Cut(Exception):  # noqa: N818 - it is what was asked for
    """The connection ends here."""


class Handler(BaseHTTPRequestHandler):
    """One request; a protocol adds `routes`."""

    protocol_version = "HTTP/1.1"
    hub: LocalServer

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        split = urlsplit(self.path)
        path = unquote(split.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        self.fault = self.hub.fault_for(method, path)
        try:
            self.body = self._read_body()
            headers = {key.lower(): value for key, value in self.headers.items()}
            self.hub.requests.append(Request(method, path, headers, self.body))
            if self.fault is not None and self.fault.status is not None:
                self.answer(self.fault.status, {"error": "as asked"})
                return
            if self.fault is not None and method != "GET":
                raise _Cut
            for pattern, handle in self.routes():
                wanted, _, expression = pattern.partition(" ")
                found = re.fullmatch(expression, path)
                if found and method in wanted.split("|"):
                    handle(*found.groups())
                    return
            self.answer(404, {"error": f"nothing at {path}"})
        except _Cut:
            self.close_connection = True
            self.connection.close()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        length = int(self.headers.get("Content-Length") or 0)
        if length and self.fault is not None and self.fault.status is None:
            self.rfile.read(min(length, self.fault.after_bytes))
            raise _Cut
        return self.rfile.read(length)

    def routes(self) -> list[tuple[str, Callable[..., None]]]:
        """METHOD path -> handler; the groups of the path are its arguments."""
        return []

    # ---- answers ----

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        """JSON, unless it is bytes already."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_file(self, content: bytes, headers: dict[str, str]) -> None:
        """A file, from where the range says; cut where a fault says."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        end = min(int(asked[2]), len(content) - 1) if asked and asked[2] else len(content) - 1
        part = content[start : end + 1]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
        for name, value in {**headers, "Content-Length": str(len(part))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None:
            self.wfile.write(part[: self.fault.after_bytes])
            self.wfile.flush()
            raise _Cut
        self.wfile.write(part)

    def user(self) -> str | None:
        """Who asks, by the token."""
        return self.hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))


def git_oid(content: bytes) -> str:
    """What git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
