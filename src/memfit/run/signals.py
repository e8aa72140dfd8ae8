"""The signals that end a process, as exceptions: what is open is closed, what is half is removed.

The exit code is the shell's: 128 and the signal's number, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED = 128 + signal.SIGINT

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, signal_number: int = signal.SIGINT) -> None:
        super().__init__()
        self.signal_number = int(signal_number)

    @property
    def exit_code(self) -> int:
        """What a shell gives a process that this signal ended."""
        return 128 + self.signal_number


@contextlib.contextmanager
def handled(handler: Callable[..., Any]) -> Iterator[None]:
    """The signals that end a process come here for as long as it lasts; only the main thread may.

    A signal that was ignored (nohup, a background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [one for one in STOPPING_SIGNALS if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, handler) for one in taken}
    try:
        yield
    finally:
        for one, former in before.items():
            signal.signal(one, former)


def stop_at_once(signal_number: int, *_: Any) -> None:
    """Outside of training there is nothing to finish: what is open is closed and removed."""
    raise Stopped(signal_number)
