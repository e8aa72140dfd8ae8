"""`memfit doctor` on a machine that has a GPU: what it says against what torch and NVML say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from memfit.config import files
from memfit.doctor.diagnosis import diagnose, findings
from memfit.doctor.environment import look_around
from memfit.doctor.measure import measure
from memfit.doctor.reach import readiness
from memfit.memory import nvml
from memfit.memory.cards import find_card
from memfit.training.progress import MemoryLogging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def test_the_driver_names_the_card_torch_sees() -> None:
    driver = nvml.driver()
    assert driver is not None
    names = [card.name for card in driver.cards]
    assert torch.cuda.get_device_name(0) in names
    card = driver.cards[names.index(torch.cuda.get_device_name(0))]
    assert card.capability == torch.cuda.get_device_capability(0)
    total = torch.cuda.get_device_properties(0).total_memory
    assert card.total_bytes == pytest.approx(total, rel=0.05)
    built_for = tuple(int(part) for part in str(torch.version.cuda).split(".")[:2])
    assert driver.cuda[0] >= built_for[0]
    assert driver.version[0].isdigit()


def test_a_machine_that_trains_has_no_problems() -> None:
    found = look_around()
    assert found.torch.sees_gpu
    assert [one.text for one in findings(found) if one.kind == "problem"] == []


def test_every_strategy_is_ready_on_the_card_that_is_here() -> None:
    found = look_around()
    missing = [one for one in readiness(found) if not one.ready]
    assert [one.strategy for one in missing] == ["fully_sharded"]
    assert all("several processes" in str(one.reason) for one in missing)


def test_without_a_name_the_card_here_is_judged_by_its_free_memory() -> None:
    held = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    found = diagnose(table=False)
    assert found.card is not None
    assert found.card.name == torch.cuda.get_device_name(0)
    assert found.budget_bytes < found.card.total_bytes - held.nbytes


def test_what_is_logged_is_what_the_allocator_reserved() -> None:
    from transformers import TrainingArguments

    held = torch.zeros(2**28, device="cuda")
    logs: dict[str, float] = {"loss": 1.0}
    MemoryLogging().on_log(TrainingArguments("unused", report_to="none"), logs=logs)
    assert held.nbytes / 2**30 <= logs["memory_gib"] <= logs["memory_peak_gib"]
    assert logs["memory_gib"] == pytest.approx(torch.cuda.memory_reserved() / 2**30, abs=1e-3)


def test_this_card_is_measured_whole_and_kept_for_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    found = measure()
    assert found.failed.keys() <= {"flash", "bf16", "triton"}
    total = torch.cuda.get_device_properties(0).total_memory
    usable = found.found["usable"]
    assert usable["reached_bytes"] > 0.8 * usable["free_bytes"]
    assert torch.cuda.memory_reserved() < 2**30  # all of it was given back
    assert 0 < found.found["context"]["empty_bytes"] <= found.found["context"]["loaded_bytes"]
    row = tomllib.loads("[cards]\n" + found.pasted())["cards"][found.card]
    assert row["gib"] == pytest.approx(total / 2**30, rel=0.001)
    used = files._used.set(True)  # tests take nothing from the cache
    card = find_card(found.card)
    files._used.reset(used)
    assert card.measured
    assert card.reached is not None
    assert card.reached.half_flops == pytest.approx(row["reached"]["half_flops"])
