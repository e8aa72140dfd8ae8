"""Optimizer state made before step 1, and updates that are finished once they have begun."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.optimization import Adafactor

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.memory.out_of_memory import OPERATOR_TRIES, is_out_of_memory, retrying
from memfit.training.guard.updates import allocate_state, careful, steps_in_backward
from small_training import collate, model_of, texts

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params),
    "AdamW foreach": lambda params: AdamW(params, foreach=True),
    "AdamW fused": lambda params: AdamW(params, fused=True),
    "Adam amsgrad": lambda params: Adam(params, amsgrad=True),
    "SGD": lambda params: SGD(params, lr=0.1),
    "SGD momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda params: RMSprop(params),
    "Adagrad": lambda params: Adagrad(params),
    "NAdam": lambda params: NAdam(params),
    "Adafactor": lambda params: Adafactor(
        params, lr=1e-3, relative_step=False, scale_parameter=False
    ),
}
# These make nothing, or make it from the first gradient itself.
LATE = ("SGD", "SGD momentum", "Adafactor")


ROOM = 2 * 4 * (35 + 9)
"""Enough for the first two parameters at a time."""


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 7), (9,), (30, 20))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


class FailOnce(TorchDispatchMode):
    """One operator finds no memory."""

    def __init__(self, number: int, times: int = 1) -> None:
        super().__init__()
        self.number, self.times = number, times
        self.seen = self.raised = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        if self.seen >= self.number and self.raised < self.times:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def same_state(one: Optimizer, other: Optimizer) -> bool:
    mine, theirs = one.state_dict()["state"], other.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    return all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[number][name]))
        for number, state in mine.items()
        for name, value in state.items()
        if value is not None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_state_made_early_is_the_state_the_first_step_makes(kind):
    early, late = parameters(), parameters()
    one, other = KINDS[kind](early), KINDS[kind](late)
    allocate_state(one)
    made = sum(len(state) for state in one.state.values())
    assert (made > 0) == (kind not in LATE)
    assert all(p.grad is None for p in early)
    for step in range(3):
        for params, optimizer in ((early, one), (late, other)):
            give_gradients(params, step)
            optimizer.step()
    assert same_state(one, other)
    assert all(torch.equal(p, q) for p, q in zip(early, late, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_fails_at_any_operator_ends_as_if_it_had_not(kind):
    clean = parameters()
    reference = KINDS[kind](clean)
    counter = FailOnce(10**9)
    for step in range(2):
        give_gradients(clean, step)
        with counter:
            reference.step()
    for number in range(1, counter.seen // 2 + 1, 3):
        params = parameters()
        optimizer = KINDS[kind](params)
        careful(optimizer, CPU, lambda: None)
        for step in range(2):
            give_gradients(params, step)
            with FailOnce(number) as fault:
                optimizer.step()
            assert fault.raised == 1 or fault.seen < number
        assert same_state(optimizer, reference)
        assert all(torch.equal(p, q) for p, q in zip(params, clean, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_where_little_is_free_parameters_are_updated_a_few_at_a_time(kind):
    few, all_at_once = parameters(), parameters()
    one, other = KINDS[kind](few), KINDS[kind](all_at_once)
    calls: list[int] = []
    plain = one.step

    @functools.wraps(plain)
    def counted(**named: Any) -> Any:
        calls.append(sum(p.grad is not None for p in few))
        return plain(**named)

    one.step = counted  # type: ignore[method-assign]
    careful(one, CPU, lambda: ROOM)
    for step in range(3):
        for params, optimizer in ((few, one), (all_at_once, other)):
            give_gradients(params, step)
            optimizer.step()
    assert calls == ([3] if "fused" in kind else [2, 1]) * 3
    assert all(torch.equal(p, q) for p, q in zip(few, all_at_once, strict=True))
    assert same_state(one, other)


class CountsItsSteps(Optimizer):
    """As schedule-free optimizers do: one count a group, on which the update depends."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] / group["k"] * p.grad)


class AdamWWithACount(AdamW):
    """A user's subclass of an optimizer that keeps nothing a group."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        super().step(closure)


@pytest.mark.parametrize("kind", [CountsItsSteps, AdamWWithACount])
def test_an_optimizer_that_may_count_its_steps_makes_one_an_update(kind):
    few, all_at_once = parameters(), parameters()
    one, other = kind(few), kind(all_at_once)
    careful(one, CPU, lambda: ROOM)
    for step in range(3):
        for params, optimizer in ((few, one), (all_at_once, other)):
            give_gradients(params, step)
            optimizer.step()
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert one.param_groups[0].get("k", 3) == 3
    assert all(torch.equal(p, q) for p, q in zip(few, all_at_once, strict=True))


def test_hooks_of_a_step_hear_of_one_an_update():
    params = parameters()
    optimizer = AdamW(params)
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append(params[0].grad is not None))
    careful(optimizer, CPU, lambda: ROOM)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    assert heard == [True] * 3


def test_a_careful_step_is_still_what_a_schedule_expects():
    params = parameters()
    optimizer = AdamW(params, lr=1.0)
    careful(optimizer, CPU, lambda: None)
    careful(optimizer, CPU, lambda: None)  # a second time changes nothing
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_operator_that_never_finds_memory_is_given_up():
    with pytest.raises(torch.OutOfMemoryError), FailOnce(1, times=100) as fault, retrying(CPU):
        torch.zeros(3)
    assert fault.raised == OPERATOR_TRIES


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_running_out_of_memory_looks_like(error, memory):
    assert is_out_of_memory(error) == memory


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
def test_a_trainer_trains_a_second_time_with_little_room(tmp_path, optim):
    """The Trainer keeps its optimizer, wrapped by accelerate since the first time."""
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=2, optim=optim, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = BudgetTrainer(model_of(), args, collate, texts())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.guard.room_bytes = lambda: 4096  # type: ignore[method-assign]
    for _ in range(2):
        before = trainer.model.classifier.weight.detach().clone()
        assert trainer.train().global_step == 2
        assert not torch.equal(trainer.model.classifier.weight, before)


# ---- optimizers that step inside backward ----


def layerwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own layerwise set-up around torch's AdamW; GaLore itself is not installed."""
    module = types.ModuleType("galore_torch")
    for name in ("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor"):
        setattr(module, name, AdamW)
    monkeypatch.setitem(sys.modules, "galore_torch", module)
    found = "transformers.trainer_optimizer.is_galore_torch_available"
    monkeypatch.setattr(found, lambda: True)


def trained_layerwise(kind: type, tmp_path: Any, **named: Any) -> Any:
    steps = named.pop("gradient_accumulation_steps", 1)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=3, use_cpu=True, logging_steps=1,
        optim="galore_adamw_layerwise", optim_target_modules=["query"], learning_rate=1e-3,
        save_strategy="no", report_to="none", disable_tqdm=True,
        gradient_accumulation_steps=steps,
    )  # fmt: skip
    model = model_of(dropout=0.0)
    trainer = kind(model, args, train_dataset=texts(), data_collator=collate, **named)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model.state_dict()


@pytest.mark.parametrize("cut", [{"micro_batching": MicroBatching(max_rows=3)}, {"budget": "60MB"}])
def test_what_steps_inside_backward_runs_whole_and_is_not_rehearsed(cut, tmp_path, monkeypatch):
    layerwise(monkeypatch)
    said: list[str] = []
    losses, weights = trained_layerwise(transformers.Trainer, tmp_path)
    cut = {**cut, "say_adjustment": said.append}
    ours, ours_weights = trained_layerwise(BudgetTrainer, tmp_path, **cut)
    assert ours == pytest.approx(losses, abs=2e-5)
    for name, value in weights.items():
        torch.testing.assert_close(ours_weights[name], value, rtol=0, atol=2e-6, msg=name)
    assert len(said) == ("micro_batching" in cut)
    assert all("inside backward" in line and "whole batches" in line for line in said)


def test_what_steps_inside_backward_refuses_accumulation(tmp_path, monkeypatch):
    layerwise(monkeypatch)
    with pytest.raises(ConfigError, match="layerwise updates weights inside backward"):
        trained_layerwise(BudgetTrainer, tmp_path, gradient_accumulation_steps=2)


def test_hooks_that_only_look_do_not_make_an_optimizer_step_inside_backward():
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: None)
    assert not steps_in_backward(model, optimizer)
    assert steps_in_backward(model, SGD(parameters(), lr=0.1))
