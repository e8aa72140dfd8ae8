"""The caching allocator's model against sequences worked out by hand, and against its own laws."""

from __future__ import annotations

import base64
import json
import time
import zlib
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.memory.allocator import Allocator, round_request, segment_bytes
from memfit.memory.components import Component, Event, MemoryPeak
from memfit.units import KIB, MIB
from step_memory import peak_on_a_card

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def born(block: int, nbytes: int) -> Event:
    return Event(block, nbytes, True, Component.ACTIVATIONS)


def dead(block: int) -> Event:
    return Event(block, 0, False, Component.ACTIVATIONS)


def reserved(*events: Event, expandable: bool = False) -> int:
    return peak_on_a_card(events, expandable_segments=expandable).reserved_bytes


@pytest.mark.parametrize(
    ("nbytes", "rounded"),
    [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (3_000_000, 3_000_320)],
)
def test_requests_are_rounded_up_to_512_bytes(nbytes: int, rounded: int) -> None:
    assert round_request(nbytes) == rounded


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_are_2_mib_then_20_mib_then_as_large_as_the_request(
    size: int, segment: int
) -> None:
    assert segment_bytes(size) == segment


def test_small_requests_share_a_segment_of_2_mib_until_it_is_full() -> None:
    full = [born(i, 512 * KIB) for i in range(4)]
    assert reserved(*full) == 2 * MIB
    assert reserved(*full, born(4, 1)) == 4 * MIB


def test_small_and_large_requests_never_share_a_segment() -> None:
    # The 20 MiB segment has 18 MiB free, but a small request does not get at them.
    assert reserved(born(0, 2 * MIB), born(1, KIB)) == 22 * MIB


def test_the_rest_of_a_large_block_is_used_only_when_more_than_1_mib() -> None:
    # 20 - 9 - 9 leaves 2 MiB, which the third request takes whole.
    assert reserved(born(0, 9 * MIB), born(1, 9 * MIB), born(2, 2 * MIB)) == 20 * MIB
    # A rest of exactly 1 MiB is not split off: the block of 10 MiB stays whole.
    peak = peak_on_a_card([born(0, 10 * MIB), dead(0), born(1, 9 * MIB)])
    assert (peak.allocated_bytes, peak.reserved_bytes) == (10 * MIB, 10 * MIB)


def test_allocated_counts_the_whole_block_when_the_rest_is_not_split_off() -> None:
    # 11.5 MiB come in a segment of 12 MiB; the half MiB too much counts as allocated.
    peak = peak_on_a_card([born(0, 11 * MIB + 512 * KIB)])
    assert (peak.allocated_bytes, peak.reserved_bytes) == (12 * MIB, 12 * MIB)


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    # Free: 30 and 12 MiB. A request of 12 takes the 12, so that 30 still fits afterwards.
    events = [born(0, 30 * MIB), born(1, 12 * MIB), dead(0), dead(1)]
    assert reserved(*events, born(2, 12 * MIB), born(3, 30 * MIB)) == 42 * MIB


def test_among_equal_blocks_the_lowest_address_is_taken_which_is_the_newest_segment() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(64 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(64 * MIB) is blocks[-1]


def test_freed_neighbours_join_and_take_a_larger_request() -> None:
    # One segment of 20 MiB cut into 5 + 5 + 5 + 5; two freed neighbours hold 9 MiB again.
    parts = [born(i, 5 * MIB) for i in range(4)]
    assert reserved(*parts, dead(1), dead(2), born(4, 9 * MIB)) == 20 * MIB


def test_freed_blocks_that_are_not_neighbours_do_not_join() -> None:
    parts = [born(i, 5 * MIB) for i in range(4)]
    assert reserved(*parts, dead(0), dead(2), born(4, 9 * MIB)) == 40 * MIB


def test_a_growing_batch_fragments_plain_segments_but_not_expandable_ones() -> None:
    # Ever larger requests, one after the other: no old segment is of use to the next request.
    events = []
    for i, size in enumerate((40, 44, 48, 52)):
        events += [born(i, size * MIB), dead(i)]
    assert reserved(*events) == (40 + 44 + 48 + 52) * MIB
    assert reserved(*events, expandable=True) == 60 * MIB


def test_expandable_pools_grow_by_pages_of_2_and_20_mib() -> None:
    assert reserved(born(0, KIB), expandable=True) == 2 * MIB
    assert reserved(born(0, 3 * MIB), expandable=True) == 20 * MIB
    assert reserved(born(0, 15 * MIB), born(1, 15 * MIB), expandable=True) == 40 * MIB
    assert reserved(born(0, 15 * MIB), born(1, 15 * MIB)) == 32 * MIB


def test_expandable_blocks_are_split_to_the_byte() -> None:
    peak = peak_on_a_card([born(0, 11 * MIB + 512 * KIB)], expandable_segments=True)
    assert (peak.allocated_bytes, peak.reserved_bytes) == (11 * MIB + 512 * KIB, 20 * MIB)


def test_an_expandable_hole_is_preferred_to_the_end_that_can_still_grow() -> None:
    # 12 free between two live blocks, 8 free at the end: 6 go into the hole, though 8 is closer.
    parts = [born(0, 8 * MIB), born(1, 12 * MIB), born(2, 12 * MIB), dead(1)]
    assert reserved(*parts, born(3, 6 * MIB), born(4, 8 * MIB), expandable=True) == 40 * MIB
    assert reserved(*parts, born(3, 6 * MIB), born(4, 8 * MIB + 512), expandable=True) == 60 * MIB


def asked_bytes(peak: MemoryPeak) -> int:
    """What a process that is held to a part of the card must be allowed, without its context."""
    return peak.device_bytes - peak.components[Component.CONTEXT]


def test_a_process_is_asked_for_the_whole_segment_though_pages_are_mapped() -> None:
    # 36 MiB need one more page beside the 18 free: 20 MiB, and yet 36 must be allowed.
    events = [born(0, 22 * MIB), born(1, 36 * MIB)]
    peak = peak_on_a_card(events, expandable_segments=True)
    assert (peak.reserved_bytes, asked_bytes(peak)) == (60 * MIB, (40 + 36) * MIB)
    plain = peak_on_a_card(events)
    assert asked_bytes(plain) == plain.reserved_bytes == 58 * MIB


def test_expandable_pages_that_are_wholly_free_are_unmapped() -> None:
    allocator = Allocator(expandable_segments=True)
    _, freed = allocator.allocate(2 * MIB), allocator.allocate(58 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(freed)
    allocator.release()
    # 18 of the 58 MiB share their page with the 2 MiB kept.
    assert allocator.reserved_bytes == 20 * MIB


def test_unmapped_pages_are_mapped_again_at_the_lowest_address() -> None:
    allocator = Allocator(expandable_segments=True)
    _, middle, _ = (allocator.allocate(20 * MIB) for _ in range(3))
    hole = middle.address
    allocator.free(middle)
    allocator.release()
    assert allocator.reserved_bytes == 40 * MIB
    again = allocator.allocate(20 * MIB)
    assert again.address == hole
    assert allocator.reserved_bytes == 60 * MIB


def test_the_peak_is_where_allocated_was_highest() -> None:
    events = [born(0, 4 * MIB), born(1, 4 * MIB), dead(0), born(2, KIB), dead(1), dead(2)]
    named = [event._replace(module=f"module {number}") for number, event in enumerate(events)]
    assert peak_on_a_card(named).module == "module 1"


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Event]:
    """Births and deaths in a valid order; every block dies in the end."""
    sizes = st.one_of(
        st.integers(1, 4 * KIB), st.integers(MIB - KIB, 3 * MIB), st.integers(9 * MIB, 50 * MIB)
    )
    events: list[Event] = []
    live: list[int] = []
    for number, size in enumerate(draw(st.lists(sizes, max_size=60))):
        events.append(born(number, size))
        live.append(number)
        while live and draw(st.booleans()):
            events.append(dead(live.pop(draw(st.integers(0, len(live) - 1)))))
    return events + [dead(number) for number in live]


@given(lifetimes(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_reserved_covers_allocated_which_covers_what_was_asked_for(
    events: list[Event], expandable: bool
) -> None:
    allocator = Allocator(expandable_segments=expandable)
    blocks, asked, before = {}, 0, 0
    for event in events:
        if event.birth:
            blocks[event.block] = (allocator.allocate(event.nbytes), round_request(event.nbytes))
            asked += blocks[event.block][1]
        else:
            block, size = blocks.pop(event.block)
            allocator.free(block)
            asked -= size
        assert asked <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes >= before  # nothing goes back by itself
        before = allocator.reserved_bytes
    assert allocator.allocated_bytes == 0
    allocator.release()
    assert allocator.reserved_bytes == 0


def test_a_second_step_reserves_more_where_small_requests_take_large_blocks() -> None:
    sizes = [3 * MIB] * 6 + [12 * MIB] * 2
    step = [born(i, size) for i, size in enumerate(sizes)] + [dead(i) for i in range(len(sizes))]
    # First the six share 20 MiB; in the second step they are cut from the free 12s, four to one.
    assert reserved(*step) == 44 * MIB
    assert reserved(*step * 2) == 56 * MIB
    assert reserved(*step * 4) == 56 * MIB
    assert reserved(*step, expandable=True) == 60 * MIB
    assert reserved(*step * 4, expandable=True) == 60 * MIB


def test_blocks_never_overlap() -> None:
    for expandable in (False, True):
        allocator = Allocator(expandable_segments=expandable)
        sizes = [KIB, 3 * MIB, 700 * KIB, 11 * MIB, 512, 2 * MIB, 25 * MIB] * 20
        live = []
        for step, size in enumerate(sizes):
            block = allocator.allocate(size)
            live.append(block)
            if step % 3 == 2:
                allocator.free(live.pop(step // 3))
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def recorded(name: str) -> tuple[list[Event], dict[str, Any], dict[str, Any]]:
    """The allocations and frees of a real run, its case and what the real allocator counted."""
    packed = json.loads((RESULTS / "memory_h200.history.json").read_text())[name]
    runs = json.loads((RESULTS / "memory_h200.json").read_text())["runs"]
    run = next(run for run in runs if run["case"]["id"] == name)
    numbers = array("q")
    numbers.frombytes(zlib.decompress(base64.b64decode(packed["events"])))
    events, count = [], 0
    for nbytes, block in zip(numbers[::2], numbers[1::2], strict=True):
        events.append(dead(block) if nbytes < 0 else born(count, nbytes))
        count += nbytes >= 0
    return events, run["case"], run["measured"]


@pytest.mark.parametrize(
    "name",
    [
        "bert-base/32x1/len128/mixed/adamw_torch_fused",
        "xlmr-base/32x1/len128/mixed/adafactor/bf16",
        "qwen3-0.6b/4x1/len256/mixed/adamw_torch_fused/bf16",
        "bert-base/32x1/len128/mixed/adamw_torch_fused/bf16/expandable_segments",
    ],
)
def test_a_recorded_run_reserves_and_allocates_what_the_real_allocator_did(name: str) -> None:
    events, case, measured = recorded(name)
    peak = peak_on_a_card(events, expandable_segments=case["expandable_segments"])
    assert peak.allocated_bytes == measured["max_memory_allocated"]
    assert peak.reserved_bytes == measured["max_memory_reserved"]


def test_a_recorded_run_whose_addresses_were_given_out_otherwise_is_off_by_a_segment() -> None:
    # Equal blocks are told apart by their addresses, and those are the driver's choice.
    events, _, measured = recorded("modernbert-base/32x1/len128/mixed/adamw_torch_fused/bf16")
    peak = peak_on_a_card(events)
    assert peak.allocated_bytes == pytest.approx(measured["max_memory_allocated"], rel=1e-4)
    assert abs(peak.reserved_bytes - measured["max_memory_reserved"]) <= 20 * MIB


def test_a_step_of_forty_thousand_events_takes_less_than_half_a_second() -> None:
    sizes = [512, 4 * KIB, 4 * MIB, 16 * MIB, 64 * MIB, 3 * MIB, 100_000, MIB]
    events = [born(i, sizes[i * 7 % 8]) for i in range(20_000)]
    events += [dead(i) for i in sorted(range(20_000), key=lambda i: i * 7919 % 20_000)]
    began = time.process_time()
    peak_on_a_card(events)
    assert time.process_time() - began < 0.5
