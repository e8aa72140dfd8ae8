"""The cap on a card that is not here: what of the budget is the context's, and that it may grow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memfit.memory import available, device
from memfit.memory.available import CudaReader
from memfit.memory.cuda_context import PAGE_BYTES
from memfit.training.limits import CudaCap
from memfit.units import MIB

TOTAL = 12 * 2**30
USUAL = 160 * MIB


class Card:
    """What torch and the driver say of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved_bytes, self.context_bytes, self.share = 0, USUAL, 1.0
        self.own_bytes: int | None = None
        self.seconds = 0.0
        properties = SimpleNamespace(major=8, minor=6, multi_processor_count=28)
        for name, value in {
            "current_device": lambda: 0,
            "get_device_properties": lambda _: properties,
            "get_device_capability": lambda _: (properties.major, properties.minor),
            "mem_get_info": lambda _: (TOTAL - self.context_bytes - self.reserved_bytes, TOTAL),
            "memory_reserved": lambda _: self.reserved_bytes,
            "get_per_process_memory_fraction": lambda _: 1.0,
            "set_per_process_memory_fraction": lambda share, _: setattr(self, "share", share),
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(device, "measured_context_bytes", lambda _: self.context_bytes)
        monkeypatch.setattr(device, "own_context_bytes", lambda _: self.answer())
        monkeypatch.setattr(available.time, "monotonic", lambda: self.seconds)

    def answer(self) -> int | None:
        if self.own_bytes == -1:
            raise OSError("NVML answered with error 999")
        return self.own_bytes

    @property
    def allowed_bytes(self) -> int:
        return round(self.share * TOTAL)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def capped(expected: int | None, limit: int = 4 * 2**30) -> tuple[CudaReader, CudaCap]:
    reader = CudaReader(torch.device("cuda", 0), expected)
    cap = CudaCap(reader)
    assert not cap.keep()  # nothing to keep yet
    cap.move(limit)
    return reader, cap


def test_what_a_plan_expects_of_the_context_is_left_free_before_it_is_there(card: Card) -> None:
    reader, _ = capped(USUAL + 100 * MIB)
    assert card.allowed_bytes == 4 * 2**30 - USUAL - 100 * MIB
    # But it is not held yet: what others leave is what the driver says.
    assert reader().own_bytes == USUAL


def test_a_context_that_grew_is_taken_from_what_tensors_may_have(card: Card) -> None:
    reader, cap = capped(None)
    before = card.allowed_bytes
    card.own_bytes = reader.context_bytes + 50 * MIB
    reader()
    assert not cap.keep()  # it is not asked again so soon
    card.seconds = 3.0
    card.reserved_bytes = before - 10 * MIB
    reader()
    assert cap.keep()
    # The page that torch may map beyond its limit is left free, too.
    assert card.allowed_bytes == before - 50 * MIB - PAGE_BYTES
    card.reserved_bytes = 0
    assert not cap.keep()


@pytest.mark.parametrize("own_bytes", [None, -1, 5 * 2**30], ids=["unknown", "error", "strange"])
def test_a_driver_that_does_not_know_changes_nothing(card: Card, own_bytes: int | None) -> None:
    reader, cap = capped(None)
    before = card.allowed_bytes
    card.own_bytes, card.seconds = own_bytes, 3.0
    reader()
    assert not cap.keep()
    assert card.allowed_bytes == before


def test_graphs_and_copies_are_expected_where_there_is_no_plan(card: Card) -> None:
    device = torch.device("cuda", 0)
    card.context_bytes = 0
    plain = CudaReader(device).context_bytes
    copying = CudaReader(device, copies=True).context_bytes
    graphs = CudaReader(device, graphs=True).context_bytes
    assert copying - plain == 70 * MIB
    assert graphs > copying
