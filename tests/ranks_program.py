"""What every rank of tests/faults/test_several_ranks.py runs: trainings, one after the other.

    python ranks_program.py FOLDER NAME...      started by torchrun

Each training is left in FOLDER as NAME-RANKS-RANK. With RANKS_ON=cuda they share one card.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.memory.measured import plain_tensors
from memfit.strategies import (
    Checkpointing,
    FullySharded,
    HalfPrecision,
    LowBitAdamW,
    Packing,
    Strategy,
)
from memfit.strategies.fully_sharded import is_divided
from small_training import collate, wide_model, wide_texts

EFFECTIVE, ROWS = 8, 37
ON = os.environ.get("RANKS_ON", "cpu")
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

CUT = MicroBatching(max_tokens=60)
WAYS: dict[str, tuple[tuple[Strategy, ...], MicroBatching | None]] = {
    "kept": ((LowBitAdamW(),), CUT),
    "divided": ((FullySharded(), Checkpointing(), Packing()), CUT),
    "divided_whole": ((FullySharded(),), None),
    "divided_half": ((HalfPrecision(), FullySharded(), Checkpointing()), CUT),
    "recomputed": ((Checkpointing(), Packing()), CUT),
    "packed": ((LowBitAdamW(), Packing()), CUT),
}
MOMENTS = ("momentum_buffer", "moment1", "scale1", "moment2", "scale2")
SAVING = ("saved", "killed", "divided")
EVALUATING = ("plain", "divided_half", "recomputed")


class Adversarial(BudgetTrainer):
    """FGM: a second backward on embeddings moved along their gradient."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        words = self.model.get_input_embeddings().weight
        moved = 0.1 * words.grad / words.grad.norm()
        words.data += moved
        self.accelerator.backward(self.compute_loss(model, self._prepare_inputs(inputs)))
        words.data -= moved
        return loss


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
    exact = not strategies or way in ("recomputed", "divided")
    if RANKS == 1:
        strategies = tuple(one for one in strategies if not isinstance(one, FullySharded))
    # Of 33 rows the last step of an epoch has one: the other ranks have none.
    rows = {"divided": 33, "recomputed": 33, "overridden": 32}.get(way, ROWS)
    # Beside others on other numbers of ranks.
    output = f"of-{way}-{more or RANKS}" if way in WAYS else "saved"
    args = TrainingArguments(
        str(folder / output), per_device_train_batch_size=EFFECTIVE // RANKS,
        num_train_epochs=2, optim="sgd" if exact else "adamw_torch",
        optim_args="momentum=0.9" if way == "divided" else None,
        learning_rate=0.05 if exact else 1e-3, max_grad_norm=1.0, logging_steps=1,
        save_strategy="steps" if kind in SAVING else "no", save_steps=2,
        report_to=[], use_cpu=ON == "cpu", ddp_backend="gloo" if RANKS > 1 else None,
        disable_tqdm=True, per_device_eval_batch_size=3,
        eval_strategy="epoch" if way in EVALUATING else "no",
    )  # fmt: skip
    if way == "split":
        args.per_device_train_batch_size = EFFECTIVE
        args.accelerator_config.split_batches = True
    if more and int(more) != RANKS:
        # What the command was started with, before the number of ranks changed.
        args.per_device_train_batch_size = EFFECTIVE // int(more)
    kind_of_trainer = Adversarial if way == "overridden" else BudgetTrainer
    trainer = kind_of_trainer(
        wide_model(), args, train_dataset=wide_texts(rows), data_collator=collate,
        eval_dataset=wide_texts(10),
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
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "rows": trainer.effective_rows,
    }
    weights = {
        name: p.full_tensor() if is_divided(p) else p.detach().cpu()
        for name, p in trainer.model.named_parameters()
    }
    return {**made, "weights": weights}


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """By this rank, with what a tensor is only a part of."""
    parts = (part for tensor in tensors for part in plain_tensors(tensor))
    return sum(part.untyped_storage().nbytes() for part in parts)


def leave(folder: Path, *names: str) -> None:
    """These trainings, each in a file of its own."""
    for name in names:
        torch.save(trained(folder, name), folder / f"{name.replace(':', '-')}-{RANKS}-{RANK}")


if __name__ == "__main__":
    leave(Path(sys.argv[1]), *sys.argv[2:])
