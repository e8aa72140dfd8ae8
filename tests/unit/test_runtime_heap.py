"""Freed memory goes back to the system where the C library can do that."""

import platform

import psutil

from memfit.memory.out_of_memory import return_freed_memory


def test_only_glibc_says_it_did():
    assert return_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_a_heap_full_of_gaps_shrinks():
    process = psutil.Process()
    # Small enough for the heap, and every second one freed: gaps that cannot be trimmed at the end.
    blocks = [bytearray(64 * 1024) for _ in range(3000)]
    kept = blocks[::2]
    del blocks
    before = process.memory_info().rss
    if return_freed_memory():
        assert process.memory_info().rss < before - 40 * 2**20
    assert len(kept) == 1500
