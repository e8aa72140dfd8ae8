"""Shared fixtures: small real models and data, made here or read from the shared folder beside."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported: one thread a worker, so that two workers share two cores
# and every run of one test adds up in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("no shared folder beside the checkout")
    return SHARED
