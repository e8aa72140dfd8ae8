"""Every allocation and free of a CUDA run, packed small enough to be kept beside its numbers."""

from __future__ import annotations

import base64
import zlib
from array import array
from typing import Any

import torch


def history() -> dict[str, Any]:
    """Every allocation and free since the last `clean`, in order, packed.

    Two numbers an event: (bytes, 0) for an allocation, (-1, its number) for a free, where
    allocations are numbered from 0. `segments` pairs the event before which the allocator asked
    the driver for memory with the bytes it got (negative: gave back).
    """
    events, segments = array("q"), []
    live: dict[int, int] = {}
    born = unknown_frees = 0
    streams = set()
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            live[address] = born
            born += 1
            events.extend((size, 0))
            streams.add(entry["stream"])
        elif action == "free_completed":
            if address in live:
                events.extend((-1, live.pop(address)))
            else:
                unknown_frees += 1
        elif action in ("segment_alloc", "segment_map"):
            segments.append((len(events) // 2, size))
        elif action in ("segment_free", "segment_unmap"):
            segments.append((len(events) // 2, -size))
    packed = base64.b64encode(zlib.compress(events.tobytes(), 9)).decode()
    return {
        "events": packed, "segments": segments, "count": len(events) // 2,
        "streams": len(streams), "unknown_frees": unknown_frees,
    }  # fmt: skip
