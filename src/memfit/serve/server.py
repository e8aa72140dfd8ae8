"""Starts uvicorn around an application of ours, quietly, on a socket that is bound beforehand."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

ENDING_SECONDS = 30
"""How long a server that was asked to end goes on answering what it has accepted."""


_THREAD_SECONDS = 8.0
"""How long a server in a thread may take to end."""


def require_server() -> None:
    """Raises one sentence that says what to install where FastAPI or uvicorn is missing."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                "{package} is not installed; install it with: pip install 'memfit[serve]'",
                package=package,
            )


def hold_to_budget(budget: str) -> None:
    """Caps what torch may take of the GPU, so that it and the CUDA context stay inside."""
    from memfit.memory.available import reader_of
    from memfit.memory.device import (
        best_device,
        index_of,
        is_cuda,
        limit_allocator,
        usual_context_bytes,
    )
    from memfit.units import parse_budget

    device = best_device()
    if not is_cuda(device):
        raise ConfigError(
            "--budget holds the memory of a GPU, and there is none here; leave it out"
        )
    limit_bytes = reader_of(device, lambda: 0)().limit_bytes(parse_budget(budget))
    limit_allocator(device, limit_bytes - usual_context_bytes(index_of(device)))


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that has its address already: a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only where the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(
            "cannot listen on {host}:{port}: {reason}; choose another --port",
            host=host,
            port=port,
            reason=error,
        ) from None
    return bound


def address_of(bound: socket.socket) -> str:
    """Returns what a client puts before a path."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_stopped(app: Any, bound: socket.socket, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C or SIGTERM, then answers what was accepted; `say` gets the address."""
    bound.listen(2048)  # whoever connects on reading the address waits, and is not refused
    say(address_of(bound))
    _server(app).run(sockets=[bound])


@contextlib.contextmanager
def served_in_thread(app: Any, bound: socket.socket) -> Iterator[str]:
    """Serves while the block lasts, and hands it the address."""
    server = _server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    try:
        yield address_of(bound)
    finally:
        server.should_exit = True  # what was written is sent before connections are closed
        thread.join(_THREAD_SECONDS)


def _server(app: Any) -> uvicorn.Server:
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="error",
            access_log=False,  # a path may hold a secret
            timeout_keep_alive=30,
            timeout_graceful_shutdown=ENDING_SECONDS,
            server_header=False,
        )
    )
