"""Loads libraries and starts the card in the background while a run reads its table.

Half of an import is waiting for files, on slow disks more, and Python's lock is free meanwhile. Two
threads load what the main thread needs later. The groups share only packages that each of them
enters by their top name (numpy, pandas), so no thread sees a package half loaded; transformers,
which imports all of them, is loaded when both threads are done.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
from collections.abc import Iterator

_THREADS: list[threading.Thread] = []

_LEAVES = ("sympy", "sklearn.metrics")

_LAST = ("transformers", "transformers.trainer", "memfit.training.trainer")


def start_preloading(*, card: bool = True) -> None:
    """Begins; called once the settings are known to be right. Later calls change nothing.

    A run that stays on the CPU leaves the `card` alone.
    """
    if _THREADS:
        return
    for work in (_load_torch_and_card if card else _load_torch, _load_leaves):
        # Not a daemon: an interpreter that ends while torch is being loaded may crash.
        thread = threading.Thread(target=_quietly, args=(work,), name=f"memfit{work.__name__}")
        _THREADS.append(thread)
        thread.start()


def finish_preloading() -> None:
    """Loads the rest, once the threads are done. What failed in them is raised here again."""
    for thread in _THREADS:
        thread.join()
    for name in ("torch", *_LEAVES, *_LAST):
        importlib.import_module(name)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Around imports: modules are no garbage, and collections look through them again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _quietly(work: object) -> None:
    with contextlib.suppress(Exception):
        assert callable(work)
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
