"""A big card that acts as a small one: described, limited and computing as that one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit.memory import cards, device
from memfit.memory.available import CudaReader
from memfit.memory.cuda_context import PAGE_BYTES, SMALL, VARIABLE, handle_workspace_bytes
from memfit.planner import step_time
from memfit.planner.task import memory_of
from memfit.strategies.base import Setup
from memfit.units import GIB, MIB, Budget

CUDA = torch.device("cuda", 0)
H200_BYTES = 140 * GIB


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An H200 as far as torch is asked; its kernels' switches are put back."""
    before = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()]
    workspaces = os.environ.get(VARIABLE)
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=H200_BYTES, multi_processor_count=132, major=9, minor=0
    )
    answers: dict[str, Any] = {
        "is_available": True, "current_device": 0, "get_device_name": "NVIDIA H200",
        "get_device_properties": properties, "get_device_capability": (9, 0),
        "mem_get_info": (H200_BYTES - GIB, H200_BYTES), "memory_reserved": 500 * MIB,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    forget()
    yield monkeypatch
    forget()
    torch.backends.cuda.enable_flash_sdp(before[0])
    torch.backends.cuda.enable_cudnn_sdp(before[1])
    os.environ.pop(VARIABLE, None)
    if workspaces is not None:
        os.environ[VARIABLE] = workspaces


def forget() -> None:
    cards._act_as.cache_clear()
    device.has_triton.cache_clear()
    step_time._of_card.cache_clear()


def test_the_card_is_described_as_the_small_one_and_not_measured(
    acting: pytest.MonkeyPatch,
) -> None:
    acting.setenv(cards.ACT_AS, "gtx 1650 4gb")
    small = cards.find_card("GeForce GTX 1650 4GB")
    card = step_time.calibrate(CUDA)
    assert (card.name, card.capability) == (small.name, (7, 5))
    assert (card.total_bytes, card.reached) == (small.total_bytes, None)
    assert card.context_bytes == small.context_bytes + PAGE_BYTES
    assert device.capability(CUDA) == (7, 5)
    assert device.name_of(CUDA) == "GeForce GTX 1650 4GB (NVIDIA H200)"


def test_memory_is_the_small_cards_beside_its_predicted_context(
    acting: pytest.MonkeyPatch,
) -> None:
    acting.setenv(cards.ACT_AS, "T4")
    card = cards.this_card()
    assert card is not None
    reading = memory_of(CUDA)
    assert reading.total_bytes == card.total_bytes
    assert reading.free_bytes + reading.own_bytes == card.usable_bytes
    assert reading.own_bytes == 500 * MIB + card.context_bytes
    reader = CudaReader(CUDA, expected_bytes=700 * MIB)
    reader.measure()  # the H200's own context would be larger
    assert reader.context_bytes == 700 * MIB
    assert reader().limit_bytes(Budget(bytes=20 * GIB)) < card.total_bytes


@pytest.mark.parametrize(("name", "flash"), [("T4", False), ("RTX 3060 12GB", True)])
def test_kernels_the_small_card_lacks_are_switched_off(
    acting: pytest.MonkeyPatch, name: str, flash: bool
) -> None:
    acting.setenv(cards.ACT_AS, name)
    setup = Setup.__new__(Setup)
    setup.device, setup.card = CUDA, None
    assert bool(setup.lacks_bf16) is not flash
    assert torch.backends.cuda.flash_sdp_enabled() is flash
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert os.environ[VARIABLE] == SMALL
    assert handle_workspace_bytes((9, 0)) == handle_workspace_bytes((7, 5), {})


def test_triton_is_left_alone_where_the_small_card_has_none(acting: pytest.MonkeyPatch) -> None:
    acting.setattr(device.importlib.util, "find_spec", lambda _: object())
    assert device.has_triton()
    device.has_triton.cache_clear()
    acting.setenv(cards.ACT_AS, "P100")
    assert not device.has_triton()


def test_without_the_variable_the_card_is_itself(acting: pytest.MonkeyPatch) -> None:
    acting.delenv(cards.ACT_AS, raising=False)
    assert cards.acted_card() is None
    assert device.capability(CUDA) == (9, 0)
    assert device.free_and_total_bytes(0, own_bytes=0) == (H200_BYTES - GIB, H200_BYTES)
    assert VARIABLE not in os.environ
