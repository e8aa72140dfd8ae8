"""Every test finds the card as the first one did."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _known_warnings() -> None:
    """What torch says once a process must not fail whichever test comes first."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _clean_card() -> Iterator[None]:
    yield
    # pytest keeps a failed test's traceback for a debugger, and with it all tensors of the test.
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    if torch.cuda.is_available():
        if torch.cuda.get_sync_debug_mode():
            torch.cuda.set_sync_debug_mode("default")
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
