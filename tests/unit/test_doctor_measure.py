"""`memfit doctor --measure`: what is kept of it, whatever fails, and what plans make of that."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.cli import run
from memfit.config import files
from memfit.doctor import measure
from memfit.doctor.measure import Measurements, row_of
from memfit.memory import nvml
from memfit.memory.cards import CardPlace, find_card, keep_row, kept_rows, match_card
from memfit.memory.cuda_context import LOADED_LATER_BYTES
from memfit.planner.explain import margin_note
from memfit.planner.step_time import speeds_of
from memfit.units import GIB, MIB

TOTAL = round(11.76 * GIB)
RATES = {
    "fp16_flops": 2.0e13, "bf16_flops": 2.1e13, "tf32_flops": 1.0e13, "fp32_flops": 8.0e12,
    "memory_bytes_per_second": 3.0e11, "bus_bytes_per_second": 1.2e10, "launch_seconds": 9e-6,
    "host_parameters_per_second": 1e9,
}  # fmt: skip
VERSIONS = {"system": "Windows", "driver": "580.65", "torch": "2.13.0"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(files.ENVIRONMENT, str(tmp_path / "cache"))
    used = files._used.set(True)
    yield
    files._used.reset(used)


def measured(**less: None) -> Measurements:
    """An RTX 3060 beside a Windows desktop; what is None failed."""
    found: dict[str, Any] = {
        "context": {"empty_bytes": 180 * MIB, "loaded_bytes": 260 * MIB},
        "usable": {
            "total_bytes": TOTAL, "free_bytes": 10 * GIB, "reached_bytes": 9 * GIB,
            "refused_bytes": 800 * MIB, "held_by_others_bytes": 1000 * MIB + 260 * MIB, "paged": 1,
        },
        "fp16": True, "bf16": True, "flash": True, **RATES,
    }  # fmt: skip
    made = Measurements(
        "NVIDIA GeForce RTX 3060", {k: v for k, v in found.items() if k not in less}
    )
    known = match_card(made.device, TOTAL)
    assert known is not None
    made.card = known.name
    made.row = row_of(
        made, known, capability=(8, 6), total_bytes=TOTAL, multiprocessors=28, versions=VERSIONS
    )
    return made


def test_a_measured_card_replaces_what_the_file_says_of_it() -> None:
    guessed = find_card("RTX 3060 12GB", CardPlace(windows=True))
    made = measured()
    keep_row(made.card, made.row, driver="580.65", torch="2.13.0")
    card = find_card("rtx 3060 12gb")
    assert card.measured
    assert card.context_bytes == 260 * MIB + LOADED_LATER_BYTES < guessed.context_bytes
    assert card.usable_bytes == pytest.approx(TOTAL - 1800 * MIB, rel=0.001)
    assert card.margin_bytes == 0
    assert card.windows
    assert not card.has_triton  # it failed there
    assert speeds_of(card).half_flops == 2.1e13
    assert [one.about for one in margin_note(card)] == ["note.system"]
    # Whoever describes another machine means another machine.
    assert find_card("RTX 3060 12GB", CardPlace(windows=False)).reserved_bytes == 0
    with files.cache_unused():
        assert find_card("RTX 3060 12GB").reached is None


def test_what_is_printed_is_a_row_of_the_file() -> None:
    made = measured()
    row = tomllib.loads("[cards]\n" + made.pasted())["cards"]["GeForce RTX 3060 12GB"]
    assert row == made.row
    assert row["usable_gib"] == pytest.approx(11.76 - 1800 / 1024, rel=0.001)
    assert row["matrix_units"] is True
    assert (row["flash"], row["triton"]) == (True, False)


@pytest.mark.parametrize("failed", ["context", "usable", "fp32_flops", "bf16_flops"])
def test_a_row_is_made_of_what_did_not_fail(failed: str) -> None:
    made = measured(**{failed: None})
    keep_row(made.card, made.row, driver="", torch="")
    card = find_card("RTX 3060 12GB")
    assert card.measured == (failed != "context")
    assert (card.reached is None) == (failed == "fp32_flops")


def test_a_card_that_the_file_lacks_can_be_planned_for_once_it_is_measured() -> None:
    made = measured()
    row = row_of(
        made, None, capability=(8, 6), total_bytes=7 * GIB, multiprocessors=20, versions=VERSIONS
    )
    keep_row("GeForce RTX 3055 7GB", row, driver="1", torch="2")
    card = find_card("RTX 3055")
    assert card.total_bytes == 7 * GIB
    assert speeds_of(card).fp32_flops == 8.0e12


def test_a_measurement_that_fails_is_noted_and_the_next_goes_on() -> None:
    made = Measurements("card")

    def fail() -> None:
        raise RuntimeError("no kernel image is available\nCUDA kernel errors might ...")

    assert made.take("flash", fail) is None
    assert made.take("efficient", lambda: True) is True
    assert made.failed == {"flash": "RuntimeError: no kernel image is available"}
    assert made.found == {"efficient": True}


@pytest.mark.parametrize(
    "row",
    [
        {}, {"capability": [8]}, {"capability": [8, 6], "gib": "much"}, {"reached": {"speed": 1}},
        {"capability": [8, 6], "gib": 4, "sm": 1, "gb_s": 1, "fp32": 1, "half": float("inf")},
    ],
)  # fmt: skip
def test_a_damaged_row_is_as_good_as_none(row: dict[str, Any]) -> None:
    folder = files.cache_folder()
    folder.mkdir(parents=True)
    text = json.dumps({"card": "T4 16GB", "row": row})
    (folder / "card-1.json").write_text(text, encoding="utf-8")
    (folder / "card-2.json").write_text("{", encoding="utf-8")
    assert kept_rows() == {}


def test_of_several_measurements_the_newest_counts() -> None:
    made = measured()
    keep_row(made.card, {**made.row, "loaded_mib": 111}, driver="1", torch="2")
    (first,) = files.cache_folder().glob("card-*.json")
    os.utime(first, (1, 1))
    keep_row(made.card, {**made.row, "loaded_mib": 222}, driver="2", torch="2")
    assert find_card("RTX 3060 12GB").context_bytes == 222 * MIB


class Card:
    """Memory that is handed out up to a point: what torch and the driver say of it."""

    def __init__(self, free: int, *, refuses_at: int = 0, pages_at: int = 0) -> None:
        self.free, self.refuses_at, self.pages_at = free, refuses_at, pages_at
        self.given, self.now = 0, 0.0

    def zeros(self, size: int, **_: Any) -> torch.Tensor:
        self.given += size
        if self.refuses_at and self.given > self.refuses_at:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.now += 1.0 if self.pages_at and self.given > self.pages_at else 0.01
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def books(self, _: int = 0) -> tuple[int, int]:
        return max(self.free - self.given, 0), 8 * GIB


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def use(card: Card) -> dict[str, int]:
        monkeypatch.setattr(measure.torch, "zeros", card.zeros)
        monkeypatch.setattr(measure.time, "perf_counter", lambda: card.now)
        monkeypatch.setattr(nvml, "free_and_total_bytes", card.books)
        for name, value in (("synchronize", None), ("empty_cache", None), ("memory_reserved", 0)):
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        return measure.usable(0)

    yield use
    monkeypatch.undo()


def test_a_card_is_filled_until_little_is_left(replaced: Any) -> None:
    found = replaced(Card(6 * GIB))
    assert 6 * GIB - 100 * MIB <= found["reached_bytes"] <= 6 * GIB - 64 * MIB
    assert (found["refused_bytes"], found["paged"]) == (0, 0)
    assert found["held_by_others_bytes"] == 2 * GIB


def test_what_is_called_free_and_refused_is_found(replaced: Any) -> None:
    found = replaced(Card(6 * GIB, refuses_at=5 * GIB))
    assert found["reached_bytes"] == 5 * GIB
    assert found["refused_bytes"] == 1 * GIB - 64 * MIB


def test_pages_in_host_memory_are_told_by_their_speed(replaced: Any) -> None:
    found = replaced(Card(6 * GIB, pages_at=4 * GIB))
    assert (found["reached_bytes"], found["paged"]) == (4 * GIB, 1)
    assert found["refused_bytes"] == 2 * GIB - 64 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without GPU")
def test_without_a_gpu_the_cpu_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--measure"]) == 0
    shown = capsys.readouterr()
    assert "There is no GPU here: the CPU was measured." in shown.out
    assert "TFLOP/s in fp32" in shown.out
    assert not list(files.cache_folder().glob("card-*.json"))


def test_a_named_card_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--measure", "--gpu", "T4"]) == 2
    assert "leave --gpu out" in capsys.readouterr().err
