"""Memory on a CUDA card: the allocator's model, contexts, workspaces and measurements live.

Needs pytest, torch and transformers alone.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from memfit.memory import nvml
from memfit.memory.cards import match_card, this_card
from memfit.memory.components import Component, Event
from memfit.memory.cuda_context import (
    handle_workspace_bytes,
    lt_workspace_bytes,
    measured_context_bytes,
    predicted_context_bytes,
)
from memfit.memory.measured import measure
from memfit.memory.tracing.operators import Multiprocessors, reduction_buffer_bytes
from memfit.units import KIB, MIB
from step_memory import peak_on_a_card

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


@pytest.fixture(autouse=True)
def empty_allocator() -> Iterator[None]:
    """Every test starts with an allocator that holds nothing."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()


def random_lifetimes(seed: int, count: int = 400) -> list[Event]:
    """Sizes of every pool, half of them freed again in any order."""
    draw = random.Random(seed)
    sizes = [3 * KIB, 700 * KIB, MIB, 1500 * KIB, 3 * MIB, 9 * MIB, 11 * MIB, 40 * MIB, 65 * MIB]
    events: list[Event] = []
    live: list[tuple[int, int]] = []
    for block in range(count):
        nbytes = draw.choice(sizes) + draw.randrange(4096)
        events.append(Event(block, nbytes, True, Component.ACTIVATIONS))
        live.append((block, nbytes))
        while live and draw.random() < 0.45:
            gone = live.pop(draw.randrange(len(live)))
            events.append(Event(*gone, False, Component.ACTIVATIONS))
    return events


def replay(events: list[Event]) -> tuple[int, int]:
    """The same births and deaths as real tensors: the allocator's two peaks."""
    held: dict[int, torch.Tensor] = {}
    for event in events:
        if event.birth:
            held[event.block] = torch.empty(event.nbytes, dtype=torch.uint8, device="cuda")
        else:
            del held[event.block]
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("seed", range(4))
def test_random_lifetimes_reserve_what_the_model_says(seed: int) -> None:
    events = random_lifetimes(seed)
    predicted = peak_on_a_card(events)
    # A training before may have switched it on, for the rest of the process.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    allocated, reserved = replay(events)
    # Equal blocks are told apart by addresses, which are the driver's choice.
    assert predicted.reserved_bytes == pytest.approx(reserved, rel=0.02)
    assert predicted.allocated_bytes == pytest.approx(allocated, rel=0.005)


@pytest.mark.parametrize("seed", range(2))
def test_expandable_segments_reserve_what_the_model_says(seed: int) -> None:
    events = random_lifetimes(seed)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        allocated, reserved = replay(events)
        torch.cuda.empty_cache()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    predicted = peak_on_a_card(events, expandable_segments=True)
    assert (predicted.allocated_bytes, predicted.reserved_bytes) == (allocated, reserved)


def test_forward_and_backward_leave_the_predicted_workspaces() -> None:
    capability = torch.cuda.get_device_capability()
    weight = torch.ones(256, 256, device="cuda", requires_grad=True)
    bias = torch.ones(256, device="cuda", requires_grad=True)
    tensors = torch.cuda.memory_allocated()
    with torch.no_grad():
        torch.mm(weight, weight)
    handle = handle_workspace_bytes(capability)
    assert torch.cuda.memory_allocated() - tensors == handle
    out = torch.nn.functional.linear(weight, weight, bias)
    out.sum().backward()
    del out, weight, bias
    gc.collect()
    left = torch.cuda.memory_allocated()
    assert left in (2 * handle, 2 * handle + lt_workspace_bytes())


@pytest.mark.parametrize(("rows", "columns"), [(4096, 768), (4096, 3072), (2048, 1024), (512, 768)])
def test_a_sum_over_rows_takes_the_predicted_buffer(rows: int, columns: int) -> None:
    properties = torch.cuda.get_device_properties(0)
    device = Multiprocessors.of(
        torch.cuda.get_device_capability(), properties.multi_processor_count
    )
    grad = torch.zeros(rows, columns, device="cuda")
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    total = grad.sum(0)
    taken = torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before
    predicted = reduction_buffer_bytes(grad.shape, grad.stride(), [0], device)
    # Beside the buffer: the result, and one counter for each column of blocks.
    assert 0 <= taken - predicted - total.nbytes <= 4 * KIB


_ORDERS = """
import sys, torch
from memfit.memory.cuda_context import measured_context_bytes
if sys.argv[1] == "started":
    torch.zeros(1, device="cuda")
print(measured_context_bytes())
"""


def test_a_context_is_the_same_whatever_the_process_did_before() -> None:
    """Measured before the first product it would miss cuBLAS's handles: 125 MB on an H200."""
    found = []
    for order in ("fresh", "started"):
        command = [sys.executable, "-c", _ORDERS, order]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(int(done.stdout))
    assert found[0] == pytest.approx(found[1], abs=4 * MIB)


def test_the_context_is_what_the_driver_books_to_us_beside_the_allocator() -> None:
    torch.zeros(1, device="cuda")
    context = measured_context_bytes()
    assert context is not None
    properties = torch.cuda.get_device_properties(0)
    predicted = predicted_context_bytes(
        (properties.major, properties.minor), properties.multi_processor_count
    )
    assert context == pytest.approx(predicted, rel=0.25)
    with nvml.open_device() as device:
        assert device is not None
        use = device.use()
    assert context + torch.cuda.memory_reserved() <= use.used_bytes + MIB
    assert use.total_bytes > properties.total_memory


def test_this_card_is_measured_and_known_by_its_name() -> None:
    card = this_card()
    assert card is not None
    assert card.measured
    assert card.name == torch.cuda.get_device_name()
    assert card.total_bytes == torch.cuda.get_device_properties(0).total_memory
    known = match_card(card.name, card.total_bytes)
    if known is not None:
        assert known.capability == torch.cuda.get_device_capability()
        assert known.multiprocessors == card.multiprocessors


def bert(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=5000, hidden_size=512, num_hidden_layers=layers,
                        num_attention_heads=8, intermediate_size=2048)  # fmt: skip
    return BertForSequenceClassification(config).cuda()


def step(model: Any, optimizer: Any, rows: int = 32) -> None:
    ids = torch.randint(1, 5000, (rows, 128), device="cuda")
    labels = torch.zeros(rows, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_measured_step_is_the_allocators_peak_split_by_component() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer)
    with measure(model, optimizer) as found:
        step(model, optimizer)
    peak = found.peak
    parts = dict(peak.components)
    context = parts.pop(Component.CONTEXT)
    assert sum(parts.values()) == peak.allocated_bytes == torch.cuda.max_memory_allocated()
    assert peak.device_bytes == peak.reserved_bytes + context
    weights = sum(p.nbytes for p in model.parameters())
    assert parts[Component.WEIGHTS] == pytest.approx(weights, rel=0.02)
    assert parts[Component.OPTIMIZER] == pytest.approx(2 * weights, rel=0.02)
    assert parts[Component.ACTIVATIONS] > 32 * 128 * 2048 * 4
    assert "layer.1" in peak.module  # the last layer, where forward turns into backward


def test_a_peak_in_the_optimizer_is_found_there_with_all_gradients() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with measure(model, optimizer) as found:
        step(model, optimizer, rows=1)
    weights = sum(p.nbytes for p in model.parameters())
    assert found.peak.module == "optimizer"
    assert found.peak.components[Component.GRADIENTS] == pytest.approx(weights, rel=0.02)
    assert found.peak.components[Component.OPTIMIZER] == pytest.approx(2 * weights, rel=0.02)
