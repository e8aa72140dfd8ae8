"""A real training small enough to be killed fifty times, in processes that start at once.

Runs are children of a fork server that has imported everything already, so that a kill at a
random moment meets the training and not the import of torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.training.checkpoints import problem_with
from small_training import STEPS_AN_EPOCH, collate, model_of, texts

EPOCHS = 3
STEPS = EPOCHS * STEPS_AN_EPOCH
_PRELOADED = [
    "memfit.cli", "memfit.run.train", "memfit.training.trainer", "memfit.data", "memfit.planner",
    "memfit.report.page", "datasets", "sklearn.metrics", "matplotlib.pyplot", "peft",
    "transformers.models.bert.modeling_bert",
]  # fmt: skip


class Logged(BudgetTrainer):
    """Writes down which rows each step begins with, so that a kill cannot take it back."""

    rows_log: Path | None = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.rows_log is not None:
            sums = [int(value) for value in inputs["input_ids"].sum(dim=1)]
            line = json.dumps({"step": self.state.global_step + 1, "rows": sums}) + "\n"
            handle = os.open(self.rows_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handle, line.encode())
            os.close(handle)
        return super().training_step(model, inputs, num_items_in_batch)


def trainer_in(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Logged:
    """Saved after every step, evaluated after every epoch, two checkpoints kept."""
    folder.mkdir(parents=True, exist_ok=True)
    # A new process begins with other random numbers than the one that was killed.
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    defaults = {
        "per_device_train_batch_size": 8, "num_train_epochs": EPOCHS, "learning_rate": 1e-2,
        "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "logging_steps": 1,
        "eval_strategy": "epoch", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    own = {name: settings.pop(name) for name in ("strategies", "on_nan") if name in settings}
    kind = settings.pop("trainer_class", Logged)
    trainer: Logged = kind(
        settings.pop("model", None) or model_of(),
        TrainingArguments(str(folder), **{**defaults, **settings}),
        settings.pop("collator", collate),
        texts(),
        texts()[:9],
        callbacks=list(callbacks),
        micro_batching=MicroBatching(max_rows=3),
        **own,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(root: Path, **settings: Any) -> None:
    """Begin the run in `root`, or go on with it; its weights end in final.safetensors."""
    trainer = trainer_in(root / "run", **settings)
    trainer.rows_log = root / "rows.jsonl"
    begun = any((root / "run").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=begun or None)
    save_file(trainer.model.state_dict(), root / "final.safetensors")


def in_child(work: Callable[..., None], *args: Any) -> BaseProcess:
    """Start work in a process of its own; what it says goes to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_quietly, args=(work, *args))
    process.start()
    return process


def _quietly(work: Callable[..., None], root: Path, *args: Any) -> None:
    Path(root).mkdir(parents=True, exist_ok=True)
    said = os.open(Path(root) / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    work(root, *args)


def names_in(folder: Path) -> list[str]:
    """Everything in a folder, for comparison."""
    return sorted(str(item.relative_to(folder)) for item in folder.rglob("*"))


def same_weights(one: Path, other: Path) -> bool:
    """Bit for bit."""
    mine, theirs = load_file(one), load_file(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def counts_of(checkpoint: Path) -> dict[str, Any]:
    """How many steps each part of a checkpoint has counted, and the tokens it has seen."""
    assert problem_with(checkpoint) == ""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    scheduler = torch.load(checkpoint / "scheduler.pt", weights_only=True)
    return {
        "state": state["global_step"],
        "optimizer": {int(part["step"]) for part in optimizer["state"].values()},
        "schedule": scheduler["last_epoch"],
        "tokens": state["num_input_tokens_seen"],
        "logged": [entry["step"] for entry in state["log_history"] if "loss" in entry],
    }


def rows_by_step(log: Path) -> dict[int, list[list[int]]]:
    """The rows every step was begun with, each time it was."""
    found: dict[int, list[list[int]]] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], []).append(entry["rows"])
    return found
