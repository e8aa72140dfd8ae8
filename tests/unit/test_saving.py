"""What cannot be saved is known before the first step, and how large a checkpoint will be."""

from __future__ import annotations

import shutil
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import memfit
from memfit import BudgetTrainer
from memfit.errors import OutputError, SaveError
from memfit.strategies import GradientRelease, Lora, LowBitAdamW, Strategy
from memfit.training import saving
from memfit.training.checkpoints import problem_with
from memfit.training.saving import _serialised_bytes
from small_training import collate, model_of, texts


class Steps(TrainerCallback):
    """Counts the steps that were begun."""

    count = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.count += 1


class Opaque(TrainerCallback, ExportableState):
    """Keeps something JSON has no word for."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"kept": object()}}


class CutUp(torch.optim.SGD):
    """Its state lies in one storage, seen as two types."""

    def state_dict(self) -> dict[str, Any]:
        arena = torch.zeros(64, dtype=torch.uint8)
        return {**super().state_dict(), "arena": [arena[:32], arena.view(torch.int8)[32:]]}


def trainer_in(folder: Path, model: nn.Module | None = None, **more: Any) -> Any:
    own = {
        name: more.pop(name) for name in ("callbacks", "optimizers", "strategies") if name in more
    }
    args = transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 8, "max_steps": 2, "save_steps": 1, "use_cpu": True,
            "report_to": "none", "disable_tqdm": True, **more,
        },
    )  # fmt: skip
    trainer = BudgetTrainer(
        model or model_of(hidden_size=128, intermediate_size=256),
        args,
        train_dataset=texts(),
        data_collator=collate,
        **own,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.parametrize(
    "strategies",
    [(), (LowBitAdamW(), GradientRelease("kept8")), (Lora(),)],
    ids=["plain", "low-bit", "adapters"],
)
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(
    tmp_path: Path, strategies: tuple[Strategy, ...]
) -> None:
    trainer = trainer_in(tmp_path, strategies=strategies)
    trainer.train()
    written = sum(file.stat().st_size for file in (tmp_path / "checkpoint-1").iterdir())
    # Headers of safetensors, the configuration and the manifest are not counted.
    assert trainer.checkpoints.size_bytes == pytest.approx(written, abs=15_000)
    assert written > 100_000


def test_only_the_manifest_has_checksums(tmp_path: Path) -> None:
    trainer_in(tmp_path).train()
    optimizer = tmp_path / "checkpoint-1" / "optimizer.pt"
    with zipfile.ZipFile(optimizer) as file:
        assert file.testzip() is not None
    assert torch.load(optimizer, weights_only=True)["state"]
    assert problem_with(optimizer.parent) == ""
    assert torch.serialization.get_crc32_options()


def test_a_callback_whose_state_cannot_be_written_is_named_before_the_first_step(
    tmp_path: Path,
) -> None:
    steps = Steps()
    trainer = trainer_in(tmp_path, callbacks=[steps, Opaque()])
    with pytest.raises(SaveError, match=r"callback Opaque cannot be saved.*not JSON serializable"):
        trainer.train()
    assert steps.count == 0
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_whose_state_torch_refuses_is_named_before_the_first_step(
    tmp_path: Path,
) -> None:
    steps, model = Steps(), model_of()
    optimizers = (CutUp(model.parameters(), lr=0.1), None)
    trainer = trainer_in(tmp_path, model, callbacks=[steps], optimizers=optimizers)
    with pytest.raises(SaveError, match=r"optimizer's state cannot be saved.*as different types"):
        trainer.train()
    assert steps.count == 0


def test_where_nothing_is_saved_nothing_but_the_model_must_be(tmp_path: Path) -> None:
    steps, model = Steps(), model_of()
    optimizers = (CutUp(model.parameters(), lr=0.1), None)
    trainer = trainer_in(
        tmp_path, model, callbacks=[steps, Opaque()], optimizers=optimizers, save_strategy="no"
    )
    trainer.train()
    assert steps.count == 2
    assert trainer.checkpoints.size_bytes == 0


class Tied(nn.Module):
    """A plain module with one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(40, 40), nn.Linear(40, 40, bias=False)
        self.second.weight = self.first.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        logits = self.second(self.first(input_ids)).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_that_safetensors_refuses_is_named_before_the_first_step(tmp_path: Path) -> None:
    steps = Steps()
    trainer = trainer_in(tmp_path, Tied(), callbacks=[steps], strategies=())
    with pytest.raises(SaveError, match=r"the model cannot be saved.*second.weight are one weight"):
        trainer.train()
    assert steps.count == 0
    # Who writes no checkpoints keeps it in another way.
    trainer_in(tmp_path, Tied(), callbacks=[steps], strategies=(), save_strategy="no").train()
    assert steps.count == 2


def test_a_disk_without_room_for_one_checkpoint_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path / "run")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(OutputError, match=r"a checkpoint takes .* has 976.6 KiB free"):
        trainer.train()


def test_a_run_whose_model_has_no_room_is_refused_though_it_writes_no_checkpoints(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "a.csv"
    rows = [f"{n % 2},text {n}" for n in range(40)]
    table.write_text("\n".join(["label,text", *rows]), encoding="utf-8")
    free = SimpleNamespace(total=10**12, used=0, free=1000)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: free)
    with pytest.raises(OutputError, match=r"the trained model takes .* has 1000 B free") as caught:
        memfit.finetune(
            table, model=tiny_model_dir, output_dir=tmp_path / "run", quiet=True,
            save_strategy="no", max_steps=1, max_length=16, exact=True,
        )  # fmt: skip
    assert "--save-strategy" not in str(caught.value)


def test_it_takes_neither_time_nor_memory() -> None:
    """1.2 GB of state, as BERT-Large's: its pages are never touched."""
    state = {number: torch.empty(1_500_000, dtype=torch.uint8) for number in range(800)}
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    assert _serialised_bytes(state) == pytest.approx(1.2e9, rel=1e-3)
    assert time.perf_counter() - started < 1
    assert psutil.Process().memory_info().rss - before < 100e6


def test_a_checkpoint_that_finds_no_memory_is_written_after_room_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path, max_steps=1)
    write, made = trainer._save_optimizer_and_scheduler, []

    def once_without_memory(folder: str) -> None:
        if not made:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        write(folder)

    trainer._save_optimizer_and_scheduler = once_without_memory
    monkeypatch.setattr(type(trainer.guard), "make_room", lambda _: made.append(1))
    trainer.train()
    assert made == [1]
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").is_file()
    assert not list(tmp_path.glob("*unfinished*"))
