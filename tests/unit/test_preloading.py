"""Libraries are loaded beside other work, and what is wrong with them is said in the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memfit.run import preloading


def test_everything_a_run_needs_is_there_afterwards() -> None:
    """In a process of its own: here torch is loaded already."""
    script = """
import sys, threading
from memfit.run import preloading
assert "torch" not in sys.modules
preloading.start_preloading()
preloading.start_preloading()
import datasets
preloading.finish_preloading()
assert not [one for one in threading.enumerate() if one.name.startswith("memfit_load")]
for name in ("torch", "sympy", "sklearn.metrics", "transformers", "memfit.training.trainer"):
    assert name in sys.modules, name
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", script], check=True)


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "_THREADS", [])
    monkeypatch.setattr(preloading, "_LEAVES", ("a_library_that_is_missing",))
    preloading.start_preloading()
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        preloading.finish_preloading()
