"""A step that runs out of memory is run again: the same gradient, no step lost, none doubled."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from strategy_fixtures import arguments, build, collate, rows_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import RunStoppedError
from memfit.memory import available, out_of_memory
from memfit.memory.available import MemoryReading, Watch
from memfit.memory.out_of_memory import end_of_training, free_memory
from memfit.strategies import Packing
from memfit.training.checkpoints import damage
from memfit.training.guard.adjusting import Adjustment
from memfit.training.guard.step_guard import Guard
from memfit.training.limits import CountingCap
from memfit.units import DISPLAY_HEADROOM_BYTES, GIB, Budget

ROWS = rows_of(24)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class FailAt(TorchDispatchMode):
    """The n-th operators find no memory."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = set(numbers)
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        if self.seen in self.numbers:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return func(*args, **(kwargs or {}))


def trainer_of(folder: Path, model: Any = None, strategies: Any = (), **named: Any) -> Any:
    fields = {"max_steps": 3, "learning_rate": 1e-2, "seed": 3, **named.pop("fields", {})}
    given = {"train_dataset": ROWS, "data_collator": collate, "micro_batching": MicroBatching()}
    trainer = BudgetTrainer(
        model or build(**NO_DROPOUT), arguments(folder, **fields), strategies=strategies,
        **{**given, **named},
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def gradient(trainer: Any, fail: FailAt, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one effective batch, and the random state it leaves."""
    torch.manual_seed(seed)
    trainer.model.train()
    trainer.model.zero_grad()
    with fail:
        trainer.guard.run(trainer.model, collate(ROWS[:8]))
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return found, torch.get_rng_state()


@pytest.fixture(autouse=True)
def _said(caplog) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, logger="memfit"):
        yield


# ---- the gradient ----


@pytest.mark.parametrize("strategies", [(), (Packing(),)], ids=["padded", "packed"])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.95])
def test_the_gradient_of_a_recovered_step_is_the_clean_ones(tmp_path, strategies, share):
    trainer = trainer_of(tmp_path, strategies=strategies)
    count = FailAt()
    clean, _ = gradient(trainer, count)
    recovered, _ = gradient(trainer, FailAt(int(share * count.seen)))
    assert len(trainer.guard.adjustments.made) == 1
    assert float((recovered - clean).norm() / clean.norm()) < 1e-6


def test_the_same_split_has_the_same_dropout_bit_for_bit(tmp_path):
    """One row at a time: all that can be changed is recomputation, and that changes no number."""
    trainer = trainer_of(tmp_path, build(), micro_batching=MicroBatching(max_rows=1))
    count = FailAt()
    clean, state = gradient(trainer, count)
    for share in (0.2, 0.5, 0.9):
        recovered, after = gradient(trainer, FailAt(int(share * count.seen)))
        assert torch.equal(recovered, clean)
        assert torch.equal(after, state)
    assert trainer.guard.live.recomputed == 2
    assert str(trainer.guard.adjustments.made[0]).endswith("2 layers recomputed")


@pytest.fixture
def nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No object is left out of collections before a test, and as many as here after it."""
    end_of_training()
    monkeypatch.setattr(out_of_memory, "_program_froze", False)  # what was left out is the suite's
    gc.unfreeze()
    yield
    end_of_training()
    gc.freeze()


@pytest.mark.usefixtures("nothing_left_out")
def test_objects_a_program_left_out_of_collections_stay_so(tmp_path):
    gc.freeze()
    before = gc.get_freeze_count()
    trainer_of(tmp_path).train()
    free_memory(torch.device("cpu"))
    end_of_training()
    assert gc.get_freeze_count() > 0.9 * before  # some die meanwhile


@pytest.mark.usefixtures("nothing_left_out")
def test_objects_that_are_left_out_of_collections_to_free_memory_come_back(tmp_path):
    trainer = trainer_of(tmp_path)
    free_memory(torch.device("cpu"))
    assert gc.get_freeze_count() > 0
    trainer.train()
    assert gc.get_freeze_count() == 0


def test_a_failure_of_the_retry_is_another_failure(tmp_path):
    trainer = trainer_of(tmp_path)
    count = FailAt()
    clean, _ = gradient(trainer, count)
    recovered, _ = gradient(trainer, FailAt(100, 400, 800))
    assert len(trainer.guard.adjustments.made) == 3
    assert float((recovered - clean).norm() / clean.norm()) < 1e-6


def test_other_errors_are_nobodys_business(tmp_path):
    trainer = trainer_of(tmp_path)

    class Broken(FailAt):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gradient(trainer, Broken())


def test_memory_errors_of_other_allocators_are_recovered_too(tmp_path):
    trainer = trainer_of(tmp_path)
    said = iter(["CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "can't allocate memory"])
    original = trainer.executor.loss

    def loss(*args: Any) -> torch.Tensor:
        if (words := next(said, None)) is not None:
            raise RuntimeError(words)
        return original(*args)

    trainer.executor = dataclasses.replace(trainer.executor, loss=loss)
    gradient(trainer, FailAt())
    assert [made.why[:13] for made in trainer.guard.adjustments.made] == ["out of memory"] * 2


# ---- the end ----


def test_a_run_with_nothing_left_to_change_stops_with_a_checkpoint(tmp_path):
    trainer = trainer_of(tmp_path, fields={"max_steps": 5})
    original = trainer.executor.loss

    def loss(*args: Any) -> torch.Tensor:
        if trainer.state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*args)

    trainer.executor = dataclasses.replace(trainer.executor, loss=loss)
    with pytest.raises(RunStoppedError) as stopped:
        trainer.train()
    assert "out of memory in step 3, with nothing left to make smaller" in str(stopped.value)
    assert "checkpoint-2" in str(stopped.value)
    assert damage(tmp_path / "checkpoint-2") == ""
    # Gone on with where there is memory, it is the run in which nothing failed.
    again = trainer_of(tmp_path, fields={"max_steps": 5})
    again.train(resume_from_checkpoint=True)
    clean = trainer_of(tmp_path / "clean", fields={"max_steps": 5})
    clean.train()
    for mine, theirs in zip(again.model.parameters(), clean.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# ---- the budget of a CPU ----


def test_the_budget_of_a_cpu_holds_and_its_run_ends_where_the_others_do(tmp_path):
    sgd = {"optim": "sgd"}
    free = trainer_of(tmp_path, budget="10GB", fields=sgd)
    free.train()
    assert free.guard.adjustments.made == []
    held_bytes = free.guard.budget_cap.held_bytes()
    budget = held_bytes + (free.guard.rehearsal.peak_bytes - held_bytes) // 2
    tight = trainer_of(tmp_path, budget=str(budget), fields=sgd)
    tight.train()
    assert tight.guard.budget_cap.counted > 0
    assert tight.guard.budget_cap.peak_bytes <= budget < free.guard.budget_cap.peak_bytes
    for mine, theirs in zip(tight.model.parameters(), free.model.parameters(), strict=True):
        assert float((mine - theirs).detach().abs().max()) < 1e-6


def test_only_steps_that_may_need_more_than_those_before_are_counted(tmp_path):
    trainer = trainer_of(tmp_path, budget="10GB", fields={"max_steps": 12})
    trainer.train()
    # The largest batch in the rehearsal; then, at most, one usual one there and step 50.
    assert 1 <= trainer.guard.budget_cap.counted <= 3


# ---- neighbours ----


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_limit_follows_what_others_leave_and_does_not_flicker():
    clock, free = Clock(), iter([7, 7, 6.97, 3, 3.1, 3.2, 6, 2])
    follow = Watch(Budget(), lambda: MemoryReading(8 * GIB, int(next(free) * GIB), GIB), clock)
    moves = []
    for _ in range(6):
        clock.now += 1
        if moved := follow.look():
            moves.append([round((limit + DISPLAY_HEADROOM_BYTES) / GIB, 2) for limit in moved])
    assert moves == [[8.0, 4.0], [4.0, 4.2], [4.2, 7.0]]
    assert follow.look() is None  # asked again at once, it does not look


def test_with_auto_every_step_looks_and_beside_a_size_some_times_a_second():
    looks: list[float] = []

    def read() -> MemoryReading:
        looks.append(now[0])
        return MemoryReading(8 * GIB, 4 * GIB, GIB)

    now = [0.0]
    for every_step, expected in ((True, 10), (False, 4)):
        follow = Watch(Budget(), read, lambda: now[0], every_step=every_step)
        looks.clear()
        for step in range(10):
            now[0] = 0.1 * step
            follow.look()
        assert len(looks) == expected


def test_auto_is_what_looks_at_every_step(tmp_path):
    for budget, every_step in (("auto", True), ("4GB", False), (None, False)):
        trainer = trainer_of(tmp_path, budget=budget)
        assert trainer.guard.limits()[1]._every_step is every_step


def test_auto_takes_what_is_free_but_for_the_display():
    reading = MemoryReading(8 * GIB, 5 * GIB, GIB)
    assert reading.limit_bytes(Budget()) == 6 * GIB - DISPLAY_HEADROOM_BYTES
    assert reading.limit_bytes(Budget(bytes=4 * GIB)) == 4 * GIB
    assert reading.limit_bytes(Budget(fraction=0.5)) == 4 * GIB
    crowded = MemoryReading(8 * GIB, GIB, GIB)
    assert GIB < crowded.limit_bytes(Budget(bytes=4 * GIB)) < 2 * GIB


class SharedMemory:
    """A machine's memory of which `free_bytes` are left, told to a trainer in place of the real."""

    def __init__(self, trainer: Any, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self._cap = trainer.guard.budget_cap = CountingCap(trainer.guard.standing_tensors)
        self._cap.read = self.read

    def read(self) -> MemoryReading:
        held_bytes = self._cap.held_bytes()
        return MemoryReading(10**12, max(self.free_bytes - held_bytes, 0), held_bytes)


def trained_beside(tmp_path: Path, monkeypatch: Any, free_bytes: dict[int, int]) -> Any:
    """After training with `auto`; so much is free from the end of these steps on."""

    class Neighbour(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            shared.free_bytes = free_bytes.get(state.global_step, shared.free_bytes)

    monkeypatch.setattr(available, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(available, "DISPLAY_HEADROOM_BYTES", 0)
    trainer = trainer_of(tmp_path, budget="auto", strategies=[Packing()], callbacks=[Neighbour()],
                         fields={"max_steps": 8})  # fmt: skip
    shared = SharedMemory(trainer, free_bytes[0])
    trainer.train()
    assert trainer.state.global_step == 8
    return trainer


def test_the_plan_moves_before_the_wall_when_a_neighbour_takes_memory(tmp_path, monkeypatch):
    """With `auto` the budget is what is free, looked at before every step."""
    roomy = trainer_of(tmp_path, budget="10GB", strategies=[Packing()])
    roomy.train()
    needed_bytes, held_bytes = roomy.guard.rehearsal.peak_bytes, roomy.guard.budget_cap.held_bytes()
    tight_bytes = (needed_bytes + held_bytes) // 2
    free_bytes = {0: 2 * needed_bytes, 2: tight_bytes, 3: tight_bytes * 97 // 100,
                  5: 2 * needed_bytes}  # fmt: skip
    made = trained_beside(tmp_path, monkeypatch, free_bytes).guard.adjustments.made
    assert [(one.step, one.why) for one in made] == [
        (3, "less main memory is free"), (6, "more main memory is free"),
    ]  # fmt: skip
    assert not any("out of memory" in one.why for one in made)


def test_memory_that_comes_and_goes_beside_what_the_training_needs_is_not_told(
    tmp_path, monkeypatch
):
    free_bytes = {0: 40 * GIB, 1: 30 * GIB, 2: 20 * GIB, 4: 35 * GIB, 6: 10 * GIB}
    trainer = trained_beside(tmp_path, monkeypatch, free_bytes)
    assert trainer.guard.adjustments.made == []


def test_what_was_changed_is_in_the_log_and_in_what_a_checkpoint_keeps(tmp_path, caplog):
    trainer = trainer_of(tmp_path)
    gradient(trainer, FailAt(200))
    (made,) = trainer.guard.adjustments.made
    assert isinstance(made, Adjustment)
    assert made.step == 1
    assert made.why.startswith("out of memory (CUDA out of memory")
    assert made.before.endswith("tokens at once")
    assert made.after.endswith("tokens at once")
    assert caplog.messages == [str(made)]
    assert trainer.state.log_history[0]["adjustment"]["step"] == 1


# ---- evaluation ----


def test_an_evaluation_that_does_not_fit_is_done_in_smaller_pieces(tmp_path):
    trainer = trainer_of(tmp_path, fields={"per_device_eval_batch_size": 24})
    expected = trainer.predict(ROWS).predictions
    step = transformers.Trainer.prediction_step
    sizes: list[int] = []

    def limited(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self, model, inputs, *rest)

    transformers.Trainer.prediction_step = limited
    try:
        found = trainer.predict(ROWS).predictions
    finally:
        transformers.Trainer.prediction_step = step
    assert sizes[0] == 24
    first = trainer.guard.adjustments.made[0]
    assert first.before.endswith("tokens at once")
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-6)


def test_an_evaluation_whose_longest_row_never_fits_ends(tmp_path):
    """That row is a piece by itself from the beginning; halving it changed no limit."""
    trainer = trainer_of(tmp_path)
    batch = collate([{**row, "input_ids": [3] * (64 if n == 0 else 5)}
                     for n, row in enumerate(rows_of(8))])  # fmt: skip
    tried: list[int] = []

    def predict(parts: list[Any]) -> None:
        tried.append(max(len(part.rows) for part in parts))
        assert len(tried) < 20
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        trainer.guard.evaluate(batch, predict)
    assert tried[-1] == 1  # every row was tried alone


@pytest.mark.parametrize("number", [1, 2, 3])
def test_buffers_that_cannot_be_copied_at_first_lose_no_step(tmp_path, monkeypatch, number):
    """The first operators of an attempt copy the model's buffers."""

    def trained(failing: Any) -> torch.Tensor:
        attempt = Guard.attempt

        def watched(*args: Any) -> Any:
            with failing:
                return attempt(*args)

        trainer = trainer_of(tmp_path, fields={"max_steps": 1})
        with monkeypatch.context() as changed:
            changed.setattr(Guard, "attempt", watched)
            trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    assert torch.equal(trained(FailAt(number)), trained(FailAt()))
