"""What stands before every request: who may ask, by which name, and how much they may send."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from memfit.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Scope = dict[str, Any]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that binds to this host."""
    return host.strip("[]") in LOOPBACK


def read_keys(path: str) -> tuple[str, ...]:
    """Returns the keys of a file, one a line; empty lines and those with a # are passed over."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the file of keys {path} cannot be read: {reason}", path=path, reason=error
        ) from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError("the file of keys {path} is empty; write one key a line", path=path)
    return keys


class Protection:
    """An ASGI layer that refuses foreign names, missing keys and bodies that are too large.

    On loopback only names of this machine are answered, so that a page elsewhere which points its
    own name here gets nothing. Keys are compared in constant time and never logged. A `silent`
    layer says no more than the status.
    """

    def __init__(
        self,
        app: Any,
        *,
        most_body_bytes: int,
        keys: Sequence[str] = (),
        loopback: bool = True,
        open_paths: Sequence[str] = ("/health",),
        silent: bool = False,
    ) -> None:
        self._app = app
        self._most_body_bytes = most_body_bytes
        self._keys = [f"Bearer {key}".encode() for key in keys]
        self._loopback = loopback
        self._open_paths = frozenset(open_paths)
        self._silent = silent

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes a request on, or answers it with the status that says why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._loopback and not _names_this_machine(headers.get(b"host", b"")):
            reason = "this server answers only under a name of its own machine"
            await self._refuse(send, 403, reason)
            return
        if self._keys and scope["path"] not in self._open_paths:
            given = headers.get(b"authorization", b"")
            # All keys are compared: how long it takes says nothing.
            if sum(secrets.compare_digest(given, key) for key in self._keys) == 0:
                await self._refuse(send, 401, "a key is needed: Authorization: Bearer KEY")
                return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._most_body_bytes:
            await self._refuse(send, 413, f"the body is over {self._most_body_bytes:,} bytes")
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Any) -> Any:
        """A body that is sent in pieces has no length to refuse it by beforehand."""
        seen = 0

        async def counted() -> Scope:
            nonlocal seen
            message: Scope = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most_body_bytes:
                raise BodyTooLargeError
            return message

        return counted

    async def _refuse(self, send: Any, status: int, reason: str) -> None:
        body = b""
        if not self._silent:
            body = json.dumps({"error": reason, "error_type": "refused"}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),  # what is refused is not read
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class BodyTooLargeError(Exception):
    """A body without a length went on for too long."""


def _names_this_machine(host: bytes) -> bool:
    try:
        return is_loopback(urlsplit("//" + host.decode("latin-1")).hostname or "")
    except ValueError:
        return False
