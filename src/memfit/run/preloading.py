"""Loads a run's libraries while the driver creates the card's context."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading


def load_libraries(*, card: bool = True) -> None:
    """Imports what the first step needs. Without `card` no CUDA context is created.

    The driver needs a second for the context and not the interpreter, so a thread waits for it.
    """
    from memfit.memory.device import has_cuda

    # Of several cards, the Trainer decides which is this process's.
    creates = card and "LOCAL_RANK" not in os.environ and has_cuda()
    context = threading.Thread(target=_create_context)
    if creates:
        context.start()
    for name in ("transformers.trainer", "memfit.training.trainer"):
        importlib.import_module(name)
    if creates:
        context.join()


def _create_context() -> None:
    from memfit.memory.device import context_bytes

    with contextlib.suppress(Exception):  # whoever uses the card next meets the same error
        # Asking torch for the current device would create the context before it is measured.
        context_bytes(0)
