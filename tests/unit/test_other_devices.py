"""Devices that are not NVIDIA's, by stand-ins: CPU tensors that memfit takes for Apple's, and
counters in place of torch.mps, torch.xpu and ROCm's. Nothing here runs on the real thing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from strategy_fixtures import arguments, build, collate, rows_of, setup_of

from memfit import BudgetTrainer
from memfit.api import finetune
from memfit.memory import device
from memfit.memory.available import AcceleratorReader, reader_of
from memfit.memory.cards import this_card
from memfit.memory.out_of_memory import is_out_of_memory
from memfit.planner.task import card_here, memory_of
from memfit.strategies import CudaGraphs, Packing
from memfit.training.limits import CountingCap
from memfit.units import GIB, MIB
from sentences import FEW_REVIEWS

CPU = torch.device("cpu")
MPS_ERROR = (
    "MPS backend out of memory (MPS allocated: 9.06 GiB, other allocations: 512.00 KiB, max "
    "allowed: 9.07 GiB). Tried to allocate 256.00 MiB on private pool."
)


class Apple:
    """torch.mps as far as memfit asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recommended_bytes, self.allocated_bytes = 4 * GIB, 10 * MIB
        self.shares: list[float] = []
        self.emptied = self.waited = 0
        answers: dict[str, Any] = {
            "recommended_max_memory": lambda: self.recommended_bytes,
            "driver_allocated_memory": lambda: self.allocated_bytes,
            "set_per_process_memory_fraction": self.shares.append,
            "empty_cache": lambda: setattr(self, "emptied", self.emptied + 1),
            "synchronize": lambda: setattr(self, "waited", self.waited + 1),
            "get_rng_state": torch.get_rng_state,
            "set_rng_state": torch.set_rng_state,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.mps, name, answer)


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Apple:
    """CPU tensors are taken for Apple's."""
    original = device.kind_of
    for module in list(sys.modules.values()):
        if getattr(module, "kind_of", None) is original:
            monkeypatch.setattr(module, "kind_of", lambda _: "mps")
    for name in (device._HIGH, device._LOW):
        monkeypatch.delenv(name, raising=False)
    return Apple(monkeypatch)


@pytest.mark.usefixtures("apple")
def test_the_working_set_is_all_there_is_and_the_watermarks_keep_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = SimpleNamespace(available=3 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert card_here(CPU) is None
    reading = memory_of(CPU)
    assert (reading.total_bytes, reading.own_bytes) == (4 * GIB, 10 * MIB)
    assert reading.free_bytes == 3 * GIB  # other programs have the rest
    machine.available = 8 * GIB
    assert memory_of(CPU).free_bytes == 4 * GIB - 10 * MIB
    assert device.os.environ[device._HIGH] == "1.0"
    assert float(device.os.environ[device._LOW]) < 1.0


def test_watermarks_of_the_user_stay() -> None:
    given = {device._HIGH: "0.7"}
    device.lower_watermarks(given)
    assert given == {device._HIGH: "0.7"}


def test_a_step_that_finds_no_memory_is_run_again_in_smaller_pieces(
    apple: Apple, tmp_path: Path
) -> None:
    rows, most_tokens = rows_of(24), 60

    def trained(folder: str, limit: int) -> tuple[Any, torch.Tensor]:
        torch.manual_seed(0)
        model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

        def refuse(embeddings: Any, given: tuple[Any, ...], _: Any) -> None:
            if embeddings.training and given[0].numel() > limit:
                raise RuntimeError(MPS_ERROR)

        model.bert.embeddings.word_embeddings.register_forward_hook(refuse)
        trainer = BudgetTrainer(
            model, arguments(tmp_path / folder, max_steps=3, learning_rate=1e-2),
            train_dataset=rows, data_collator=collate, budget="1GB",
        )  # fmt: skip
        trainer.train()
        return trainer, torch.cat([p.detach().flatten() for p in model.parameters()])

    assert is_out_of_memory(RuntimeError(MPS_ERROR))
    _, clean = trained("clean", 10**6)
    trainer, weights = trained("tight", most_tokens)
    assert len(trainer.guard.adjustments.made) >= 1
    assert trainer.state.global_step == 3
    assert float((weights - clean).norm() / clean.norm()) < 1e-5
    assert isinstance(trainer.guard.budget_cap, CountingCap)
    assert apple.emptied >= 1
    assert apple.shares[0] == pytest.approx(1e9 / (4 * GIB))
    assert apple.shares[-1] == 1.0  # given back at the end


@pytest.mark.usefixtures("undrawn")
def test_a_whole_run_plans_inside_the_working_set_and_ends_with_a_model(
    apple: Apple, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apple.recommended_bytes = 1 * GIB
    table = tmp_path / "a.csv"
    table.write_text(FEW_REVIEWS, encoding="utf-8")
    result = finetune(
        table, output_dir=tmp_path / "run", model=tiny_model_dir, max_length=16, max_steps=2
    )
    assert result.summary.memory.budget_bytes < apple.recommended_bytes
    assert result.summary.plan["fidelity"] == "exact"
    assert set(result.summary.plan["strategies"]) <= {"packing", "fused_attention"}
    assert result.summary.training["steps"] == 2
    assert (tmp_path / "run" / "model.safetensors").is_file()
    said = capsys.readouterr().err
    # The device's, of what is recommended but for a display; not the process'.
    assert "memory 10.0 MiB (peak 10.0 MiB of 768.0 MiB)" in said


def test_intels_memory_is_read_by_torchs_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = torch.device("xpu", 0)
    shares: list[float] = []
    for name, answer in {
        "mem_get_info": lambda _: (6 * GIB, 8 * GIB),
        "memory_reserved": lambda _: GIB,
        "set_per_process_memory_fraction": lambda share, _: shares.append(share),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.xpu, name, answer, raising=False)
    reading = reader_of(xpu, lambda: 0)()
    assert (reading.total_bytes, reading.free_bytes, reading.own_bytes) == (8 * GIB, 6 * GIB, GIB)
    CountingCap(list, xpu).move(2 * GIB)
    assert shares == [0.25]
    assert "has no CUDA graphs" in CudaGraphs().unavailable(on(xpu))


def test_amds_cards_are_called_cuda_by_torch_and_not_taken_for_nvidias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * GIB)
    assert (device.kind_of(card), device.is_cuda(card)) == ("rocm", False)
    assert this_card() is None
    assert not device.has_cuda()
    reader = reader_of(card, lambda: 0)
    assert isinstance(reader, AcceleratorReader)
    assert reader().own_bytes == 2 * GIB
    setup = on(card)
    assert setup.device_type == "rocm"
    assert "has no CUDA graphs" in CudaGraphs().unavailable(setup)
    assert not Packing().unavailable(setup)
    assert not setup.lacks_bf16


def on(where: torch.device) -> Any:
    setup = setup_of(build())
    setup.device = where
    return setup
