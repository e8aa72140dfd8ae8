"""AdamW on the host: the same training as with the stock one, bit by bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from strategy_models import (
    CLIP,
    LateLink,
    batch_for,
    build,
    groups_of,
    setup_for,
    train,
    weights_of,
)
from torch import Tensor, nn
from transformers import TrainerCallback

import small_training
from memfit import BudgetTrainer, TrainingArguments
from memfit.errors import ConfigError
from memfit.strategies import Fidelity, OptimizerOffload, Setup
from memfit.strategies.offload.host_adamw import HostAdamW
from memfit.strategies.offload.host_memory import PlainLink, Staging

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-3, fused=True)


def hosted(model: nn.Module, **settings: Any) -> HostAdamW:
    settings = {"lr": 1e-3, "max_grad_norm": CLIP, **settings}
    return HostAdamW(groups_of(model), LateLink(), order=model.parameters(), **settings)


def saved(optimizer: torch.optim.Optimizer) -> Any:
    """Through a file, as the Trainer loads it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "deberta-v2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_update_is_stock_adamws_bit_by_bit(name: str, micro_batches: int) -> None:
    theirs, ours = build(name), build(name)
    their_norms = train(theirs, stock(theirs), range(5), micro_batches)
    our_norms = train(ours, hosted(ours), range(5), micro_batches)
    assert our_norms == their_norms
    assert min(our_norms) > CLIP  # so clipping did something
    assert torch.equal(weights_of(ours), weights_of(theirs))
    assert not torch.equal(weights_of(ours), weights_of(build(name)))


def test_a_step_clips_even_if_nobody_asks_for_the_norm() -> None:
    theirs, ours = build("bert"), build("bert")
    for model in (theirs, ours):
        torch.manual_seed(1)
        optimizer = hosted(model) if model is ours else stock(model)
        model(**batch_for(model)).loss.backward()
        if model is theirs:
            assert float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)) > CLIP
        optimizer.step()
    assert torch.equal(weights_of(ours), weights_of(theirs))


def test_weights_without_a_gradient_stay_and_frozen_ones_are_left_alone() -> None:
    theirs, ours = build("bert"), build("bert")
    for model in (theirs, ours):
        model.bert.embeddings.requires_grad_(False)
    train(theirs, stock(theirs), range(2))
    train(ours, hosted(ours), range(2))
    assert torch.equal(weights_of(ours), weights_of(theirs))
    optimizer = hosted(build("bert"))
    before = [p.clone() for group in optimizer.param_groups for p in group["params"]]
    optimizer.step()
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_same_bit_by_bit(dtype: torch.dtype) -> None:
    whole, first, second = (build("bert").to(dtype) for _ in range(3))
    straight = hosted(whole)
    train(whole, straight, range(6), schedule=False)
    half = hosted(first)
    train(first, half, range(3), schedule=False)
    second.load_state_dict(first.state_dict())
    again = hosted(second)
    again.load_state_dict(saved(half))
    train(second, again, range(3, 6), schedule=False)
    assert torch.equal(weights_of(second), weights_of(whole))
    for ours, expected in zip(again.state.values(), straight.state.values(), strict=True):
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in ours)
        assert all(value.dtype == torch.float32 for value in ours.values())


def test_checkpoints_are_those_of_stock_adamw() -> None:
    model = build("bert")
    reference = stock(model)
    train(model, reference, range(2))
    twin = build("bert")
    twin.load_state_dict(model.state_dict())
    ours = hosted(twin)
    ours.load_state_dict(saved(reference))
    train(model, reference, range(2, 4))
    train(twin, ours, range(2, 4))
    assert torch.equal(weights_of(twin), weights_of(model))
    back = stock(twin)
    back.load_state_dict(saved(ours))
    first = next(iter(back.state.values()))
    assert float(first["step"]) == 4


def test_bf16_weights_follow_fp32_masters() -> None:
    """Against AdamW on masters of our own, which a bf16 model computes from."""
    model = build("bert")
    setup = setup_for(model, learning_rate=1e-4, max_grad_norm=CLIP, weight_decay=0.1)
    masters = [p.detach().clone() for p in model.parameters()]
    OptimizerOffload(dtype="bfloat16").attach(setup, LateLink(), LateLink())
    twin = build("bert").to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert setup.make_optimizer is not None
    optimizer = setup.make_optimizer([{"params": list(model.parameters())}], setup.args)
    reference = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.1, fused=True)
    for number in range(4):
        for one in (model, twin):
            torch.manual_seed(number)
            one(**batch_for(one, seed=number)).loss.backward()
        for master, p in zip(masters, twin.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        for one in (optimizer, reference):
            one.step()
        for master, p in zip(masters, twin.parameters(), strict=True):
            p.data.copy_(master)
    assert torch.equal(weights_of(model), weights_of(twin))
    exported = optimizer.fp32_state_dict(model)
    for (name, _), master in zip(model.named_parameters(), masters, strict=True):
        assert exported[name].dtype == torch.float32
        assert torch.equal(exported[name], master)


def test_weights_that_are_loaded_meanwhile_are_respected() -> None:
    for strategy in (OptimizerOffload(), OptimizerOffload(dtype="bfloat16")):
        model = build("bert")
        setup = setup_for(model, learning_rate=0.0, weight_decay=0.0)
        strategy.attach(setup, LateLink(), LateLink())
        assert setup.make_optimizer is not None
        optimizer = setup.make_optimizer([{"params": list(model.parameters())}], setup.args)
        for _ in range(2):  # before the first step, then after it
            new = {name: value + 0.5 for name, value in model.state_dict().items()}
            new["bert.embeddings.word_embeddings.weight"][0] = 0.5
            model.load_state_dict(new)
            model(**batch_for(model)).loss.backward()
            optimizer.step()
            assert all(torch.equal(model.state_dict()[name], new[name]) for name in new)


def test_dropped_gradients_are_dropped_on_the_host_too() -> None:
    model = build("bert")
    optimizer = hosted(model)
    before = weights_of(model)
    model(**batch_for(model)).loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weights_of(model), before)
    model(**batch_for(model)).loss.backward()
    optimizer.remove()
    model(**batch_for(model)).loss.backward()
    assert model.classifier.weight.grad is not None


def test_weights_of_other_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        HostAdamW([nn.Parameter(torch.zeros(2, dtype=torch.float64))], PlainLink())


def test_tensors_larger_than_all_slots_travel_in_pieces() -> None:
    link = LateLink()
    staging = Staging(link, slot_bytes=64, slots=3)
    sources = [torch.randn(1000), torch.randn(33).to(torch.bfloat16)]
    arrived = [torch.zeros_like(source) for source in sources]
    longest: list[int] = []
    for source, target in zip(sources, arrived, strict=True):

        def deliver(start: int, piece: Tensor, target: Tensor = target) -> None:
            target[start : start + len(piece)] = piece
            longest.append(piece.nbytes)

        staging.down(source, deliver)
    staging.flush()
    assert all(torch.equal(a, b) for a, b in zip(arrived, sources, strict=True))
    assert max(longest) == 64
    target = torch.zeros(777, dtype=torch.bfloat16)
    source = torch.randn(777)
    staging.up(source, target)
    staging.flush()
    assert torch.equal(target, source.to(torch.bfloat16))


# ---- what it says ----


CASES: list[tuple[Callable[[], Setup], OptimizerOffload, str]] = [
    (lambda: setup_for(build("bert"), optim="adafactor"), OptimizerOffload(), "adafactor"),
    (lambda: setup_for(build("albert")), OptimizerOffload(weights=True), "share their weights"),
    (
        lambda: setup_for(build("bert", num_hidden_layers=2)),
        OptimizerOffload(weights=True),
        "has no more",
    ),
    (lambda: setup_for(build("bert"), bf16=True), OptimizerOffload(dtype="bfloat16"), "bf16 off"),
    (
        lambda: setup_for(build("bert").requires_grad_(False)),
        OptimizerOffload(),
        "no weight is trainable",
    ),
]


@pytest.mark.parametrize(("make", "strategy", "reason"), CASES)
def test_what_cannot_be_offloaded_says_why(
    make: Callable[[], Setup], strategy: OptimizerOffload, reason: str
) -> None:
    setup = make()
    setup.device = torch.device("cuda")
    assert reason in strategy.unavailable(setup)
    with pytest.raises(ConfigError, match=reason):
        strategy.apply(setup)


def test_on_a_cpu_it_says_that_the_optimizer_is_there_already() -> None:
    setup = setup_for(build("bert"))
    assert "host memory already" in OptimizerOffload().unavailable(setup)
    with pytest.raises(ConfigError, match="host memory already"):
        OptimizerOffload().apply(setup)
    assert setup.make_optimizer is None
    on_a_card = Setup(model=setup.model, args=setup.args, device=torch.device("cuda"))
    assert OptimizerOffload(weights=True).unavailable(on_a_card) == ""
    assert OptimizerOffload().fidelity is Fidelity.EXACT
    assert OptimizerOffload(dtype="bfloat16").fidelity is Fidelity.ROUNDING
    with pytest.raises(ConfigError, match="bfloat16"):
        OptimizerOffload(dtype="int8")  # type: ignore[arg-type]


def test_too_little_host_memory_is_said_before_anything_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = setup_for(build("bert"))
    setup.device = torch.device("cuda")
    learning = sum(p.numel() for p in setup.model.parameters())
    for free, weights, fits in ((16, False, True), (15, False, False), (16, True, False)):
        memory = SimpleNamespace(available=free * learning)
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
        reason = OptimizerOffload(weights=weights).unavailable(setup)
        assert (reason == "") is fits
        assert fits or "of the computer's memory" in reason


# ---- in a Trainer: the best model, and a second training ----


@pytest.fixture
def on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as the device: copies, masters and updates are those of a card."""
    monkeypatch.setattr(OptimizerOffload, "unavailable", lambda *_: "")


class Masters(TrainerCallback):
    """The model in full precision after every step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):  # noqa: ARG002
        inner = getattr(optimizer, "optimizer", optimizer)
        exported = inner.fp32_state_dict(model).items()
        self.after[state.global_step] = {name: value.clone() for name, value in exported}


def offloaded(folder: Path, strategy: OptimizerOffload, **settings: Any) -> BudgetTrainer:
    """Four steps, saved and evaluated after each; the second is the best."""
    scores = iter([0.5, 0.9, 0.2, 0.1] * 3)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=4, save_strategy="steps",
        save_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=1e-2,
        metric_for_best_model="score", greater_is_better=True, report_to="none", use_cpu=True,
        disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = BudgetTrainer(
        small_training.model_of(dropout=0.0), args, small_training.collate,
        small_training.texts(), small_training.texts(4), strategies=[strategy],
        compute_metrics=lambda _: {"score": next(scores)},
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.usefixtures("on_this_cpu")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_best_model_is_saved_with_its_own_masters(tmp_path: Path, dtype: Any) -> None:
    trainer = offloaded(
        tmp_path / "run", OptimizerOffload(dtype=dtype), load_best_model_at_end=True
    )
    trainer.add_callback(masters := Masters())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    best = masters.after[2]
    assert all(saved[name].dtype == torch.float32 for name in saved)
    assert all(torch.equal(saved[name], best[name]) for name in saved)
    assert not all(torch.equal(saved[name], masters.after[4][name]) for name in saved)


@pytest.mark.usefixtures("on_this_cpu")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_trainer_that_is_resumed_a_second_time_goes_on_from_the_checkpoint(
    tmp_path: Path, dtype: Any
) -> None:
    trainer = offloaded(tmp_path / "run", OptimizerOffload(dtype=dtype))
    trainer.add_callback(masters := Masters())
    trainer.train()
    first = dict(masters.after)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert masters.after.keys() == first.keys()
    for step in (3, 4):
        again = masters.after[step]
        assert again is not first[step]
        assert all(torch.equal(again[name], first[step][name]) for name in again), step


def test_weights_loaded_after_the_last_step_are_what_is_exported() -> None:
    model = build("bert")
    setup = setup_for(model, learning_rate=1e-2)
    OptimizerOffload(dtype="bfloat16").attach(setup, LateLink(), LateLink())
    assert setup.make_optimizer is not None
    optimizer: Any = setup.make_optimizer([{"params": list(model.parameters())}], setup.args)
    model(**batch_for(model)).loss.backward()
    optimizer.step()
    state = saved(optimizer)
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})
    for loaded in (False, True):
        if loaded:  # state of other weights: what is loaded later than it counts
            optimizer.load_state_dict(state)
        exported = optimizer.fp32_state_dict(model)
        for name, value in model.state_dict().items():
            assert torch.equal(exported[name], value.float()), (loaded, name)
