"""Running out of real memory on a card, behind the cap: recovered, and the same gradient."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.memory.available import CudaReader, MemoryReading, Watch
from memfit.memory.cuda_context import own_context_bytes
from memfit.strategies import (
    Checkpointing,
    CudaGraphs,
    GradientRelease,
    LowBitAdamW,
    Packing,
    Strategy,
    copies_beside,
    find,
)
from memfit.strategies.offload.host_memory import give_back_unused
from memfit.training.limits import CudaCap, pinned_bytes
from memfit.units import MIB, Budget
from small_training import collate, model_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda", 0)
LAYERS, WIDTH = 6, 512


SHAPE = {
    "vocab_size": 2000, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "intermediate_size": 2048, "max_position_embeddings": 160,
}  # fmt: skip


def texts(rows: int = 128, longest: int = 128) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(rows):
        length = int(torch.randint(longest // 2, longest, (), generator=generator))
        ids = torch.randint(5, 2000, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": ids[0] % 2})
    return made


def trainer_of(
    folder: Path, strategies: list[Strategy], *, dropout: float = 0.0, budget: Any = None,
    limits: MicroBatching | None = None, **fields: Any,
) -> Any:  # fmt: skip
    defaults = {
        "per_device_train_batch_size": 32, "max_steps": 12, "learning_rate": 1e-4, "seed": 3,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **{**defaults, **fields})
    trainer = BudgetTrainer(
        model_of(dropout, **SHAPE), args, strategies=strategies, train_dataset=texts(),
        data_collator=collate, budget=budget, micro_batching=limits or MicroBatching(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def gradient(trainer: Any) -> torch.Tensor:
    torch.manual_seed(5)
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.guard.run(trainer.model, collate(texts(32)))
    return torch.cat([p.grad.float().flatten().cpu() for p in trainer.model.parameters()])


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def needed_bytes(trainer: Any) -> int:
    """Beyond what is held between two steps."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    gradient(trainer)
    trainer.model.zero_grad()
    return torch.cuda.max_memory_allocated() - held


def cap_to(trainer: Any, room_bytes: int) -> CudaCap:
    """Leave room for so much more than what is held now."""
    gc.collect()
    torch.cuda.empty_cache()
    cap = CudaCap(CudaReader(CUDA))
    limit = torch.cuda.memory_allocated() + cap.read.context_bytes + room_bytes
    trainer.guard.cap = cap
    trainer.guard.watch = Watch(Budget(bytes=limit), cap.read)
    trainer.guard.watch.limit_bytes = limit
    cap.move(limit)
    return cap


@pytest.mark.parametrize(
    ("bf16", "tolerance"), [(False, 1e-5), (True, 1e-2)], ids=["fp32", "bf16 autocast"]
)
@pytest.mark.parametrize("strategies", [[], [Packing()]], ids=["padded", "packed"])
def test_real_shortage_is_recovered_with_the_clean_gradient(tmp_path, bf16, tolerance, strategies):
    """bf16: the sum over micro-batches is in fp32, but each product is rounded in other places."""
    if strategies and not bf16:
        strategies = []  # variable-length attention is for half precision
    trainer = trainer_of(tmp_path, strategies, bf16=bf16)
    trainer.accelerator.prepare(trainer.model)
    clean = gradient(trainer)
    gradients = sum(p.nbytes for p in trainer.model.parameters())  # two of them at a time
    room = 2 * gradients + (needed_bytes(trainer) - gradients) // 2
    cap = cap_to(trainer, room)
    try:
        ooms = torch.cuda.memory_stats()["num_ooms"]
        recovered = gradient(trainer)
        assert torch.cuda.memory_stats()["num_ooms"] > ooms
        reserved = torch.cuda.memory_reserved() + cap.read.context_bytes
        assert reserved <= trainer.guard.watch.limit_bytes
    finally:
        cap.release()
    assert trainer.guard.adjustments.made
    assert float((recovered - clean).norm() / clean.norm()) < tolerance


def test_the_smallest_piece_is_recomputed_and_then_offloaded(tmp_path):
    trainer = trainer_of(tmp_path, [Packing()], bf16=True, limits=MicroBatching(max_rows=1))
    trainer.accelerator.prepare(trainer.model)
    clean = gradient(trainer)
    original, failures = trainer.executor.loss, iter([True, True])

    def loss(*args: Any) -> torch.Tensor:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*args)

    trainer.executor = dataclasses.replace(trainer.executor, loss=loss)
    recovered = gradient(trainer)
    made = [one.after for one in trainer.guard.adjustments.made]
    assert made[0].endswith(f"{LAYERS} layers recomputed")
    assert made[1].endswith("activations offloaded")
    assert float((recovered - clean).norm() / clean.norm()) < 1e-4
    assert trainer.setup.around_micro_batch


STEPS = {
    "kept8": ([Packing(), LowBitAdamW(), GradientRelease("kept8")], 1.0),
    "kept8, graphs": ([Packing(), LowBitAdamW(), GradientRelease("kept8"), CudaGraphs(256)], 1.0),
    "kept, graphs": ([Packing(), LowBitAdamW(), CudaGraphs(256)], 1.0),
}


class Held(transformers.TrainerCallback):
    """The most the process held in any step, with its context as the driver has it."""

    def __init__(self) -> None:
        self.most_bytes = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        context_bytes = own_context_bytes()
        assert context_bytes is not None
        self.most_bytes = max(self.most_bytes, torch.cuda.max_memory_reserved() + context_bytes)


def run_freely(folder: Path, strategies: list[Strategy], clip: float) -> tuple[int, list[float]]:
    """The highest moment of the largest batch with nothing in its way, and the losses."""
    trainer = trainer_of(folder, strategies, max_grad_norm=clip, budget="40GB")
    trainer.train()
    peak_bytes, seen = trainer.guard.rehearsal.peak_bytes, losses(trainer)
    trainer.setup.restore()
    return peak_bytes, seen


def between(folder: Path, name: str, share: float) -> tuple[int, list[float]]:
    """Bytes between what all layers recomputed need and what none needs, and the losses."""
    strategies, clip = STEPS[name]
    most_bytes, expected = run_freely(folder, strategies, clip)
    gc.collect()
    least_bytes, _ = run_freely(folder, [*strategies, Checkpointing()], clip)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert least_bytes < 0.8 * most_bytes
    # Pages that are not full: of the weights, of the steps' stream and of the graphs' pool.
    room_bytes = least_bytes + int(share * (most_bytes - least_bytes)) + 80 * MIB
    assert room_bytes < most_bytes
    return room_bytes, expected


@pytest.mark.parametrize("name", STEPS)
def test_a_run_in_too_small_a_budget_ends_where_a_free_one_does(tmp_path, name):
    strategies, clip = STEPS[name]
    room, expected = between(tmp_path, name, 0.35)
    graphs = find(strategies, CudaGraphs) is not None
    context = CudaReader(CUDA, copies=copies_beside(strategies), graphs=graphs).context_bytes
    budget = context + room
    tight = trainer_of(tmp_path, strategies, max_grad_norm=clip, budget=str(budget))
    held = Held()
    tight.add_callback(held)
    tight.train()
    assert tight.state.global_step == 12
    assert held.most_bytes <= budget
    assert losses(tight) == pytest.approx(expected, abs=2e-2)
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(1.0)


def test_graphs_captured_anew_recompute_more_when_a_neighbour_takes_memory(tmp_path, monkeypatch):
    from memfit.memory import available

    monkeypatch.setattr(available, "LOOK_SECONDS", 0.0)
    strategies, clip = STEPS["kept8, graphs"]
    room, _ = between(tmp_path, "kept8, graphs", 0.5)
    trainer = trainer_of(tmp_path, strategies, max_grad_norm=clip, budget="40GB", max_steps=30)
    taken = {"bytes": 0}

    class Neighbour(transformers.TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step in (10, 20):
                short = state.global_step == 10
                taken["bytes"] = 40 * 10**9 - room - context if short else 0

    trainer.add_callback(Neighbour())
    trainer.guard.budget_cap = CudaCap(trainer.guard.reader())

    context = trainer.guard.budget_cap.read.context_bytes

    class Shared(CudaReader):
        """A card of 40 GB of which a neighbour holds some."""

        def __call__(self) -> MemoryReading:
            own = torch.cuda.memory_reserved() + context
            return MemoryReading(40 * 10**9, 40 * 10**9 - own - taken["bytes"], own)

    trainer.guard.budget_cap.read = Shared(CUDA, context)
    graphs: set[int] = set()

    class Graphs(transformers.TrainerCallback):
        """Those of the last step; they go with the training."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            graphs.clear()
            graphs.update(trainer.executor._caches["whole"].tokens)

    trainer.add_callback(Graphs())
    trainer.train()
    made = trainer.guard.adjustments.made
    assert [(one.step, one.why) for one in made if "free" in one.why] == [
        (11, "less memory is free"), (21, "more memory is free"),
    ]  # fmt: skip
    assert trainer.state.global_step == 30
    assert graphs


def test_an_update_is_made_in_parts_where_its_temporaries_do_not_fit(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, [], optim="adamw_torch", max_steps=3)
    trainer.train()
    expected = [p.detach().clone() for p in trainer.model.parameters()]
    calls: list[int] = []
    plain = torch.optim.AdamW.step

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(1)
        return plain(self, *args, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    tight = trainer_of(tmp_path, [], optim="adamw_torch", max_steps=3)
    tight.guard.room_bytes = lambda: 32 * MIB
    tight.train()
    assert len(calls) > 3 * 2
    for mine, theirs in zip(tight.model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_pinned_host_memory_is_counted_by_torch() -> None:
    torch.zeros(1, device=CUDA)
    give_back_unused()
    before = pinned_bytes()
    held = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    assert pinned_bytes() - before == held.nbytes
