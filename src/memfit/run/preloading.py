"""Loads the libraries of a run, each at the moment when it costs least.

What the first step needs is loaded in one thread, one library after the other: threads that import
at the same time take the interpreter from each other and are slower together than one alone. Only
the driver works beside it, which creates the card's context without the interpreter. What is needed
after the last step is loaded while the card computes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading

_FIRST = ("transformers", "transformers.trainer", "memfit.training.trainer")

_LATER = ("sklearn.metrics", "matplotlib.figure", "matplotlib.backends.backend_svg")


_USUAL = gc.get_threshold()

_RARELY = (100_000, 10, 10)


def collect_rarely() -> None:
    """Has the garbage collector look less often: imports create no garbage, and take a tenth less.

    For a process of memfit's own. A training collects as usual: a cycle may hold the card's memory.
    """
    gc.set_threshold(*_RARELY)


def load_libraries(*, card: bool = True) -> None:
    """Loads what the first step needs. Without `card` no CUDA context is created."""
    import torch

    # Of several cards, the Trainer decides which is this process's.
    starts = card and "LOCAL_RANK" not in os.environ and torch.cuda.is_available()
    context = threading.Thread(target=_create_context)
    if starts:
        context.start()
    for name in _FIRST:
        importlib.import_module(name)
    if starts:
        context.join()
    gc.set_threshold(*_USUAL)


def load_later() -> None:
    """Loads what evaluates and draws, in a thread. What fails there fails again where it is used.

    The thread is no daemon: an interpreter that ends while a library is being loaded may crash.
    """
    threading.Thread(target=_load_later, name="memfit-load-later").start()


def _load_later() -> None:
    from memfit.records.results import versions

    for name in _LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    versions()


def _create_context() -> None:
    from memfit.memory.cuda_context import measured_context_bytes

    with contextlib.suppress(Exception):  # whoever uses the card next meets the same error
        # Asking torch for the current device would create the context before it is measured.
        measured_context_bytes(0)
