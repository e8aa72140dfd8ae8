"""What every rank of tests/faults/test_several_ranks.py runs: trainings, one after the other.

    python ranks_program.py FOLDER NAME...      started by torchrun

Each training is left in FOLDER as NAME-RANKS-RANK. With RANKS_ON=cuda they share one card.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback, TrainingArguments

from memfit import BudgetTrainer
from memfit.engine.exchange import in_messages
from memfit.engine.micro_batches import MicroBatching
from memfit.memory.measured import plain_tensors
from memfit.memory.phases import TRAINING
from memfit.planner.candidates import Candidate
from memfit.planner.pricing.step_trace import price_memory
from memfit.planner.workload import workload_of_model
from memfit.strategies import (
    Checkpointing,
    CudaGraphs,
    FullySharded,
    GradientRelease,
    HalfPrecision,
    LowBitAdamW,
    Packing,
    ShardedState,
    Strategy,
)
from memfit.training.guard.rehearsal import with_exchange
from memfit.training.progress import MemfitProgress
from small_training import collate, wide_model, wide_texts
from step_memory import peak_of_two_steps

EFFECTIVE, ROWS = 8, 37
ON = os.environ.get("RANKS_ON", "cpu")
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

CUT = MicroBatching(max_tokens=60)
WAYS: dict[str, tuple[tuple[Strategy, ...], MicroBatching | None]] = {
    "kept": ((LowBitAdamW(),), CUT),
    "kept8": ((LowBitAdamW(), GradientRelease("kept8"), Packing()), CUT),
    "host": ((LowBitAdamW(), GradientRelease("host")), CUT),
    "release": ((LowBitAdamW(), GradientRelease(clip="predicted")), None),
    "sharded": ((ShardedState(),), CUT),
    "divided": ((FullySharded(), Checkpointing(), Packing()), CUT),
    "divided_whole": ((FullySharded(),), None),
    "divided_half": ((HalfPrecision(), FullySharded(), Checkpointing()), CUT),
    "recomputed": ((Checkpointing(), Packing()), CUT),
    "graphs": ((LowBitAdamW(), GradientRelease("kept8"), Packing(), CudaGraphs()), CUT),
}
SHARDED = ("kept", "kept8", "host", "release")
WAYS |= {f"sharded_{way}": ((*WAYS[way][0], ShardedState()), WAYS[way][1]) for way in SHARDED}
MOMENTS = ("momentum_buffer", "moment1", "scale1", "moment2", "scale2")
SAVING = ("saved", "killed", "sharded", "divided", "kept8", "sharded_kept8")
NEEDS_RANKS = (ShardedState, FullySharded)
MEASURED = {"plain": 128, "kept": 256, "kept8": 256, "release": 256}
"""Ways whose memory is compared with its prediction, and how wide the model is."""
MEASURED |= {"sharded": 256, "divided": 256, "divided_whole": 256, "divided_half": 256} | {
    f"sharded_{way}": 256 for way in ("kept", "kept8", "release")
}


class Killed(TrainerCallback):
    """The last rank ends without a word after three steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == 3 and RANK == RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(folder: Path, name: str) -> dict[str, Any]:
    """One training and what became of it."""
    kind, _, more = name.partition(":")
    way = kind.removesuffix("_resumed")
    strategies, cut = WAYS.get(way, ((), CUT))
    exact = not strategies or way in ("recomputed", "sharded", "divided")
    if RANKS == 1:
        strategies = tuple(one for one in strategies if not isinstance(one, NEEDS_RANKS))
    # Of 33 rows the last step of an epoch has one: the other ranks have none.
    rows = 33 if way == "divided" else ROWS
    # Beside others on other numbers of ranks.
    output = f"of-{way}-{more or RANKS}" if way in WAYS else "saved"
    args = TrainingArguments(
        str(folder / output), per_device_train_batch_size=EFFECTIVE // RANKS,
        num_train_epochs=2, optim="sgd" if exact else "adamw_torch",
        optim_args="momentum=0.9" if way in ("sharded", "divided") else None,
        learning_rate=0.05 if exact else 1e-3, max_grad_norm=1.0, logging_steps=1,
        save_strategy="steps" if kind in SAVING else "no", save_steps=2,
        report_to=[], use_cpu=ON == "cpu", ddp_backend="gloo" if RANKS > 1 else None,
        disable_tqdm=True,
    )  # fmt: skip
    if more and int(more) != RANKS:
        # What the command was started with, before the number of ranks changed.
        args.per_device_train_batch_size = EFFECTIVE // int(more)
    trainer = BudgetTrainer(
        wide_model(), args, train_dataset=wide_texts(rows), data_collator=collate,
        strategies=strategies, micro_batching=cut, callbacks=[Killed()] if kind == "killed" else [],
    )  # fmt: skip
    checkpoint = str(folder / output / "checkpoint-6") if more else None
    trainer.train(resume_from_checkpoint=checkpoint)
    history = trainer.state.log_history
    states: Any = trainer.optimizer.state  # type: ignore[union-attr]
    made = {
        "state_bytes": {
            name: held_bytes(v for part, v in states.get(p, {}).items() if part in MOMENTS)
            for name, p in trainer.model.named_parameters()
        },
        "weight_bytes": {
            name: sum(part.nbytes for part in plain_tensors(p))
            for name, p in trainer.model.named_parameters()
        },
        "masters": trainer.masters.joined() or {},
        "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "graphs": trainer.executor.captured_graphs,
    }
    if trainer.setup.sharded is not None:
        trainer.changes.give_back()
    weights = {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}
    return {**made, "weights": weights}


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """By this rank, with what a tensor is only a part of."""
    parts = (part for tensor in tensors for part in plain_tensors(tensor))
    return sum(part.untyped_storage().nbytes() for part in parts)


def measured(folder: Path) -> dict[str, list[int]]:
    """By way: a rank's highest use as measured, as predicted, and as predicted without others."""
    texts = [{"input_ids": [2, *[5 + row] * 38, 3], "labels": row % 3} for row in range(2 * RANKS)]
    found = {}
    for way, width in MEASURED.items():
        strategies, cut = WAYS.get(way, ((), None))
        cut = MicroBatching() if cut is None else MicroBatching(max_tokens=40)
        args = TrainingArguments(
            str(folder), per_device_train_batch_size=2, report_to=[], use_cpu=True,
            ddp_backend="gloo" if RANKS > 1 else None,
        )  # fmt: skip
        peaks = []
        # gloo's threads may hold a buffer a moment longer than the layer that it was for.
        for _ in range(5 if "divided" in way else 1):
            trainer = BudgetTrainer(
                wide_model(0.1, width), args, train_dataset=texts, data_collator=collate,
                strategies=strategies, micro_batching=cut,
            )  # fmt: skip
            peaks.append(peak_of_two_steps(trainer)[0])
        workload = workload_of_model(wide_model(0.1, width), args, texts)
        found[way] = [min(peaks)]
        alone = tuple(one for one in strategies if not isinstance(one, NEEDS_RANKS))
        for task, used in ((workload, strategies), (replace(workload, ranks=1), alone)):
            _, phases, _ = price_memory(task, Candidate(used, cut), None)
            found[way].append(phases[TRAINING].allocated_bytes)
    return found


SLOW_SECONDS = 0.05


def timed(folder: Path) -> dict[str, Any]:
    """What is said of a step's time, over a link where the last rank's messages take long."""
    bar = MemfitProgress(console=Console(file=io.StringIO()))
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = BudgetTrainer(
        wide_model(), args, train_dataset=wide_texts(), data_collator=collate, budget="4GB",
        strategies=[ShardedState()], micro_batching=MicroBatching(), callbacks=[bar],
    )  # fmt: skip
    ranks = trainer.ranks
    slowed = {"launch": ranks.launch, "launch_from": ranks.launch_from}
    for name, real in slowed.items() if RANK == RANKS - 1 else ():
        setattr(ranks, name, lambda *sent, real=real: (time.sleep(SLOW_SECONDS), real(*sent))[1])
    trainer.train()
    found = trainer.guard.rehearsal
    assert found is not None
    waited, weights = ranks.waited_seconds, [p.clone() for p in trainer.model.parameters()]
    again = with_exchange(trainer, replace(found, step_seconds=0.5))
    return {
        "said": bar.step_seconds,
        "found": [found.step_seconds, found.exchange_seconds],
        "again": [again.step_seconds, again.exchange_seconds],
        "messages": len(list(in_messages(list(trainer.model.parameters())))),
        "untouched": ranks.waited_seconds == waited
        and all(map(torch.equal, trainer.model.parameters(), weights)),
    }


def leave(folder: Path, *names: str) -> None:
    """These trainings, each in a file of its own."""
    for name in names:
        other = {"measured": measured, "timed": timed}.get(name)
        made = trained(folder, name) if other is None else other(folder)
        torch.save(made, folder / f"{name.replace(':', '-')}-{RANKS}-{RANK}")


if __name__ == "__main__":
    leave(Path(sys.argv[1]), *sys.argv[2:])
