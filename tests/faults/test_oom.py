"""Out of memory at random points of forward, backward and update: no step lost, none doubled.

An operator that is chosen at random raises what CUDA's allocator raises. Afterwards the weights
must be those of a run in which nothing failed, and everything that counts steps must say the same.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

import small_training
from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.strategies import GradientRelease, LowBitAdamW, Packing
from small_training import collate, texts

STEPS = 1000
PHASES = ("forward", "backward", "update")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Hundreds of adjustments, each one line."""
    logging.getLogger("memfit").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("memfit").setLevel(logging.NOTSET)


class Faults(TorchDispatchMode):
    """Raises at a random operator of a random phase, in a share of the steps.

    How many operators a phase has is learnt from the steps before. A step that failed is as likely
    to fail again when it is run again, up to three times.
    """

    def __init__(self, share: float, seed: int = 0, phases: tuple[str, ...] = PHASES) -> None:
        super().__init__()
        self.share = share
        self.phases = phases
        self.raised: Counter[str] = Counter()
        self.failed_steps = 0
        self.phase: str | None = None
        """forward (and backward) or update; None where the Trainer's own loop is at work."""
        self._random = random.Random(seed)
        self._usual = dict.fromkeys(PHASES, 50)
        self._counts: Counter[str] = Counter()
        self._armed: tuple[str, int] | None = None
        self._left = 0

    def begin_step(self) -> None:
        for phase, count in self._counts.items():
            self._usual[phase] = count
        self.phase = "forward"
        self._left = 3
        if self._arm():
            self.failed_steps += 1

    def _arm(self) -> bool:
        self._counts.clear()
        self._armed = None
        if self._left and self._random.random() < self.share:
            phase = self._random.choice(self.phases)
            self._armed = phase, self._random.randrange(1, max(self._usual[phase], 2))
            self._left -= 1
        return self._armed is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        phase = self.phase
        if phase is None:
            return func(*args, **(kwargs or {}))
        if phase == "forward" and not torch.is_grad_enabled():
            phase = "backward"
        self._counts[phase] += 1
        if self._armed == (phase, self._counts[phase]):
            self.raised[phase] += 1
            self._arm()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


class Counted(TrainerCallback):
    """Counts updates, and ends the phase in which they may fail."""

    def __init__(self, faults: Faults | None) -> None:
        self.updates = 0
        self._faults = faults

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.updates += 1
        if self._faults is not None:
            self._faults.phase = None


class TriedTrainer(BudgetTrainer):
    """Tells the faults which phase it is in, and leaves the rest of the loop alone."""

    faults: Faults | None = None
    seen_rows = 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.seen_rows += len(inputs["labels"])
        if self.faults is None:
            return super().training_step(model, inputs, *rest, **named)
        self.faults.begin_step()
        loss = super().training_step(model, inputs, *rest, **named)
        self.faults.phase = None
        return loss

    def _get_grad_norm(self, *args: Any, **named: Any) -> Any:
        """The norm, clipping, and then the optimizer's step."""
        if self.faults is not None:
            self.faults.phase = "update"
        return super()._get_grad_norm(*args, **named)

    def _clip_grad_norm(self, *args: Any, **named: Any) -> Any:
        if self.faults is not None:
            self.faults.phase = "update"
        return super()._clip_grad_norm(*args, **named)


def model_of(width: int = 16, layers: int = 1, dropout: float = 0.0) -> Any:
    sizes = {"hidden_size": width, "num_hidden_layers": layers}
    return small_training.model_of(dropout, **sizes, intermediate_size=width * 5 // 4)


def run(
    folder: Path, faults: Faults | None, *, steps: int = STEPS, strategies: Any = (),
    rows: int | None = None, model: Any = None, **fields: Any,
) -> TriedTrainer:  # fmt: skip
    defaults = {
        "max_steps": steps, "per_device_train_batch_size": 4, "optim": "sgd", "seed": 1,
        "learning_rate": 2e-2, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 500, "max_grad_norm": 1.0,
        "logging_nan_inf_filter": False,
    }  # fmt: skip
    trainer = TriedTrainer(
        model or model_of(), TrainingArguments(str(folder), **{**defaults, **fields}),
        train_dataset=texts(), data_collator=collate, strategies=strategies,
        micro_batching=MicroBatching(max_rows=rows), callbacks=[Counted(faults)],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.faults = faults
    with faults or contextlib.nullcontext():
        trainer.train()
    return trainer


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in trainer.model.parameters()])


def counts(trainer: Any) -> dict[str, int]:
    """Steps by everything that counts them."""
    schedule: Any = trainer.lr_scheduler
    counted = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Counted))
    inner: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    found = {
        "state": trainer.state.global_step,
        "schedule": schedule.last_epoch,
        "callbacks": counted.updates,
        "rows": trainer.seen_rows,
    }
    states = [state["step"] for state in inner.state.values() if "step" in state]
    if states:
        assert len({int(step) for step in states}) == 1
        found["optimizer"] = int(states[0])
    if hasattr(inner, "clock"):
        found["optimizer"] = int(inner.clock.counters[0])
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("clean"), None)


@pytest.mark.parametrize("share", [0.05, 0.30])
def test_a_thousand_steps_of_sgd_end_with_the_clean_runs_weights(tmp_path, clean, share):
    faults = Faults(share)
    trainer = run(tmp_path, faults)
    assert faults.failed_steps == pytest.approx(share * STEPS, rel=0.3)
    assert min(faults.raised[phase] for phase in PHASES) > 0.2 * sum(faults.raised.values())
    difference = (weights(trainer) - weights(clean)).abs().max()
    assert float(difference) < 1e-5
    assert float((weights(clean) - weights(run(tmp_path, None, steps=1))).abs().max()) > 1e-2
    assert counts(trainer) == counts(clean)
    assert counts(trainer)["state"] == STEPS
    assert len(trainer.guard.adjustments.made) > 0


def test_packed_steps_recover_as_padded_ones_do(tmp_path):
    ended = [run(tmp_path, None, steps=80, strategies=[Packing()])]
    faults = Faults(0.4, seed=1)
    ended.append(run(tmp_path, faults, steps=80, strategies=[Packing()]))
    assert sum(faults.raised.values()) > 15
    assert float((weights(ended[1]) - weights(ended[0])).abs().max()) < 1e-5
    assert counts(ended[1]) == counts(ended[0])


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor"])
def test_an_update_that_fails_half_way_is_finished_bit_for_bit(tmp_path, optim):
    """One row at a time from the start: the split is the same, so are all bits; dropout is on."""
    fields = {"steps": 25, "rows": 1, "optim": optim, "learning_rate": 1e-3}
    ended = [run(tmp_path, None, model=model_of(dropout=0.1), **fields)]
    faults = Faults(0.7, seed=3)
    ended.append(run(tmp_path, faults, model=model_of(dropout=0.1), **fields))
    assert faults.raised["update"] > 3
    assert torch.equal(weights(ended[0]), weights(ended[1]))
    assert counts(ended[1]) == counts(ended[0])


@pytest.mark.parametrize("mode", ["kept", "kept8", "host"])
def test_low_bit_steps_recover_bit_for_bit_whatever_takes_the_gradients(tmp_path, mode):
    sink = [] if mode == "kept" else [GradientRelease(mode)]
    strategies = [Packing(), LowBitAdamW(), *sink]
    fields = {
        "steps": 6, "rows": 1, "strategies": strategies,
        "optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0,
    }  # fmt: skip

    def model() -> Any:
        return model_of(width=128, layers=3, dropout=0.1)

    ended = [run(tmp_path, None, model=model(), **fields)]
    faults = Faults(0.9, seed=4, phases=("backward", "backward", "update"))
    ended.append(run(tmp_path, faults, model=model(), **fields))
    assert faults.raised["backward"] > 3
    assert torch.equal(weights(ended[0]), weights(ended[1]))
    assert counts(ended[1]) == counts(ended[0])
    assert counts(ended[1])["optimizer"] == fields["steps"]
