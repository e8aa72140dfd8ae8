"""AdamW on the host, and layers whose weights live there: the same training, bit by bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from strategy_models import LateLink, batch_for, build, setup_for, step, undo
from torch import Tensor, nn

from memfit.errors import ConfigError
from memfit.runtime.trainer import BudgetTrainer
from memfit.strategies._host_adamw import HostAdamW
from memfit.strategies._host_weights import HostWeights
from memfit.strategies._hosted import PlainLink, Staging
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.base import Fidelity, Setup
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.optimizer_offload import OptimizerOffload

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

CLIP = 0.1
FAMILIES = ["bert", "distilbert", "modernbert", "deberta-v2", "qwen3"]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3},
    ]


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-3, fused=True)


def hosted(model: nn.Module, **settings: Any) -> HostAdamW:
    settings = {"lr": 1e-3, "max_grad_norm": CLIP, **settings}
    return HostAdamW(groups_of(model), LateLink(), order=model.parameters(), **settings)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
    micro_batches: int = 2,
    schedule: bool = True,
) -> list[float]:
    """A loop with a schedule, clipping, accumulation and dropout; returns the norms."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n * schedule))
    norms = []
    for number in steps:
        torch.manual_seed(number)
        for part in range(micro_batches):
            model(**batch_for(model, seed=10 * number + part)).loss.backward()
        if isinstance(optimizer, HostAdamW):
            assert all(p.grad is None for p in model.parameters())
            norms.append(float(optimizer.finish()))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return norms


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


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


# ---- in the Trainer ----


def budget_trainer(folder: Path, offload: OptimizerOffload | None, **training: Any) -> Any:
    model = build("bert")
    rows = [{name: x[0] for name, x in batch_for(model, 1, seed=n).items()} for n in range(16)]
    settings = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
        **training,
    }
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings
    )
    trainer = BudgetTrainer(model, args, train_dataset=rows)
    if offload is not None:
        offload.attach(trainer.setup, LateLink(), LateLink())
    return trainer


def test_a_training_run_is_the_same_with_clipping_and_logs_the_norm(tmp_path: Path) -> None:
    stock_run = budget_trainer(tmp_path, None)
    stock_run.train()
    for offload in (OptimizerOffload(), OptimizerOffload(weights=True)):
        ours = budget_trainer(tmp_path, offload)
        ours.train()
        undo(ours.setup)
        keys = ("loss", "grad_norm", "learning_rate")
        expected, found = (
            [[entry[key] for key in keys] for entry in run.state.log_history if "loss" in entry]
            for run in (stock_run, ours)
        )
        assert len(found) == 4
        assert found == expected
        assert torch.equal(weights_of(ours.model), weights_of(stock_run.model))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_run_resumes_from_a_checkpoint_written_while_weights_are_away(
    tmp_path: Path, dtype: Any
) -> None:
    offload = OptimizerOffload(weights=True, dtype=dtype)
    straight = budget_trainer(tmp_path, offload, save_strategy="steps", save_steps=2)
    straight.train()
    undo(straight.setup)
    resumed = budget_trainer(tmp_path, offload)
    resumed.train(str(tmp_path / "checkpoint-2"))
    undo(resumed.setup)
    assert torch.equal(weights_of(resumed.model), weights_of(straight.model))
    last = type(resumed.model).from_pretrained(tmp_path / "checkpoint-4")
    assert torch.equal(weights_of(last), weights_of(straight.model))


# ---- weights ----


def away(model: nn.Module, link: LateLink | None = None) -> tuple[Setup, HostWeights]:
    setup = setup_for(model)
    host = OptimizerOffload(weights=True).attach(setup, LateLink(), link or LateLink())
    assert host is not None
    return setup, host


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_layers_fetched_in_time_are_the_plain_steps(name: str) -> None:
    model = build(name)
    inputs = batch_for(model)
    logits, gradient = step(model, inputs)
    away(model)
    for _ in range(2):
        ours, our_gradient = step(model, inputs)
        assert torch.equal(ours, logits)
        assert torch.equal(our_gradient, gradient)


@pytest.mark.parametrize("others", ["checkpointing", "mlp", "activation_offload", "all"])
def test_weights_away_stand_beside_what_saves_activations(others: str) -> None:
    model = build("bert")
    inputs = batch_for(model)
    _, gradient = step(model, inputs)
    setup = setup_for(model)
    if others in ("checkpointing", "all"):
        Checkpointing().apply(setup)
    if others == "mlp":
        Checkpointing(part="mlp").apply(setup)
    if others in ("activation_offload", "all"):
        ActivationOffload(min_bytes=1).attach(setup, LateLink())
    host = OptimizerOffload(weights=True).attach(setup, LateLink(), LateLink())
    assert host is not None
    for _ in range(2):
        assert torch.equal(step(model, inputs)[1], gradient)
    kinds = [type(module) for module in build("bert").modules()]
    assert [type(module) for module in model.modules()] != kinds
    undo(setup)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(step(model, inputs)[1], gradient)


def test_two_layers_are_on_the_device_and_no_more() -> None:
    model = build("bert", num_hidden_layers=6)
    layers = list(model.bert.encoder.layer)
    setup, host = away(model)
    most: list[int] = []

    def note(*_: Any) -> None:
        most.append(host.resident_bytes)

    for layer in layers:
        for module in layer.modules():
            module.register_forward_hook(note)
            if isinstance(module, nn.Linear):
                module.weight.register_hook(note)
    layer_bytes = sum(-(-p.nbytes // 512) * 512 for p in layers[0].parameters())
    step(model, batch_for(model))
    assert max(most) == 2 * layer_bytes
    model.eval()
    most.clear()
    with torch.no_grad():
        model(**batch_for(model))
    assert max(most) == 2 * layer_bytes
    host.release()
    assert host.resident_bytes == 0
    assert all(p.untyped_storage().nbytes() == 0 for layer in layers for p in layer.parameters())
    undo(setup)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in layers[0].parameters())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_training_with_weights_away_is_the_same_bit_by_bit(dtype: Any) -> None:
    found = []
    for weights in (False, True):
        model = build("bert")
        setup = setup_for(model, learning_rate=1e-3, max_grad_norm=CLIP)
        offload = OptimizerOffload(weights=weights, dtype=dtype)
        offload.attach(setup, LateLink(), LateLink())
        assert setup.make_optimizer is not None
        optimizer = setup.make_optimizer(groups_of(model), setup.args)
        train(model, optimizer, range(4))
        found.append((weights_of_state(model), optimizer.fp32_state_dict(model)))
        undo(setup)
        assert torch.equal(weights_of(model), found[-1][0])
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def weights_of_state(model: nn.Module) -> Tensor:
    state = model.state_dict()
    return torch.cat([state[name].flatten().float() for name, _ in model.named_parameters()])


def test_states_are_saved_and_loaded_while_weights_are_away() -> None:
    model, other = build("bert"), build("bert")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    _, host = away(model)
    host.release()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    model.load_state_dict(other.state_dict())
    inputs = batch_for(other)
    assert torch.equal(step(model, inputs)[1], step(other, inputs)[1])


def test_lora_beside_weights_away() -> None:
    from memfit.parts import add_lora

    model = add_lora(build("bert"), 2)
    inputs = batch_for(model)
    _, gradient = step(model, inputs)
    away(model)
    assert torch.equal(step(model, inputs)[1], gradient)


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
        "no weight learns",
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
