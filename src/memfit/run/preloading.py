"""Loads libraries and starts the card in the background while a run reads its table.

An import that waits for a file, and a driver that creates a context, leave the interpreter free.
One thread loads torch, another the libraries that need no torch, while the main thread reads the
table. The threads share only packages that each of them imports by their top name (numpy, pandas):
the second one waits until the package is complete. transformers imports all of them, so it is
loaded when both threads are done.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
from collections.abc import Callable, Iterator

_THREADS: list[threading.Thread] = []

_LEAVES = ("sympy", "sklearn.metrics")

_LAST = ("transformers", "transformers.trainer", "memfit.training.trainer")


def start_preloading(*, card: bool = True) -> None:
    """Starts the threads; a second call does nothing.

    Without `card` no CUDA context is created: the run stays on the CPU.
    """
    if _THREADS:
        return
    for work in (_load_torch_and_card if card else _load_torch, _load_leaves):
        # Not a daemon: an interpreter that ends while torch is being loaded may crash.
        thread = threading.Thread(target=_quietly, args=(work,), name=f"memfit{work.__name__}")
        _THREADS.append(thread)
        thread.start()


def finish_preloading() -> None:
    """Waits for the threads and loads the rest. Raises what failed in a thread."""
    for thread in _THREADS:
        thread.join()
    for name in ("torch", *_LEAVES, *_LAST):
        importlib.import_module(name)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Switches garbage collection off around imports, which create no garbage to find."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _quietly(work: Callable[[], None]) -> None:
    """Runs the work. `finish_preloading` repeats an import that failed, and raises its error."""
    with contextlib.suppress(Exception):
        work()


def _load_leaves() -> None:
    for name in _LEAVES:
        importlib.import_module(name)


def _load_torch() -> None:
    importlib.import_module("torch")


def _load_torch_and_card() -> None:
    """Also creates the CUDA context, which takes a second and no interpreter."""
    import torch

    if "LOCAL_RANK" in os.environ or not torch.cuda.is_available():
        return  # of several cards, the Trainer decides which is this process's
    from memfit.memory.cuda_context import measured_context_bytes

    # Asking torch for the current device would create the context before it is measured.
    measured_context_bytes(0)
