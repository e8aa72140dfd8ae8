"""Freed memory goes back to the system where the C library can do that."""

from __future__ import annotations

import platform
import subprocess
import sys

import psutil
import pytest

from memfit.memory.out_of_memory import HeapTrimmer, return_freed_memory

GLIBC = platform.libc_ver()[0] == "glibc"


def test_only_glibc_says_it_did() -> None:
    assert return_freed_memory() == GLIBC


def test_a_heap_full_of_gaps_shrinks() -> None:
    process = psutil.Process()
    # Small enough for the heap, and every second one freed: gaps that cannot be trimmed at the end.
    blocks = [bytearray(64 * 1024) for _ in range(3000)]
    kept = blocks[::2]
    del blocks
    before = process.memory_info().rss
    if return_freed_memory():
        assert process.memory_info().rss < before - 40 * 2**20
    assert len(kept) == 1500


def test_short_steps_are_not_slowed_by_trims() -> None:
    now = 0.0
    heap = HeapTrimmer(lambda: now)
    assert heap.step() == GLIBC
    now = 0.4
    assert not heap.step()
    now = 0.6
    assert heap.step() == GLIBC


# Half of what is freed lies between what stays: in the heap it would stay with the process.
GAPS = """
import sys, psutil, torch
from memfit.memory.out_of_memory import return_large_blocks
if sys.argv[1] == "yes":
    assert return_large_blocks()
torch.empty(24 << 20, dtype=torch.uint8)  # freed: glibc raises its own limit to this size
blocks = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(40)]
before = psutil.Process().memory_info().rss
blocks = blocks[::2]
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not GLIBC, reason="other C libraries give large blocks back by themselves")
def test_tensors_of_a_process_with_a_budget_go_back_to_the_system_at_once() -> None:
    def freed(word: str) -> int:
        command = [sys.executable, "-c", GAPS, word]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert freed("yes") > 70 * 2**20  # of 80
    assert freed("no") < 20 * 2**20
