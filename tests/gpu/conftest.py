"""Every test finds the card as the first one did."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch


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
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
