"""Activation offload: the same gradients, two layers on the device, copies never read too early.

The real thing needs a card (tests/gpu); here its logic runs over links that stand for one.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from strategy_models import DEPTH, LateLink, batch_for, build, peak_bytes, setup_for, step
from torch import Tensor, nn

from memfit.errors import ConfigError
from memfit.memory.tracing.tracker import Tracker
from memfit.strategies import ActivationOffload, Checkpointing, Fidelity, Setup
from memfit.strategies.offload.activation_offload import ActivationHost
from memfit.strategies.offload.host_memory import Arena, Link, PlainLink
from memfit.strategies.packing.packed_model import PackedModel

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def offload(model: nn.Module, link: Link, **settings: Any) -> tuple[Setup, ActivationHost]:
    setup = setup_for(model)
    return setup, ActivationOffload(min_bytes=1, **settings).attach(setup, link)


@pytest.mark.parametrize(
    "name", ["bert", "albert", "distilbert", "modernbert", "mpnet", "deberta-v2", "qwen3"]
)
@pytest.mark.parametrize("layers", [None, 2])
def test_gradients_are_the_plain_steps_bit_by_bit(name: str, layers: int | None) -> None:
    model = build(name)
    inputs = batch_for(model)
    logits, gradient = step(model, inputs)
    link = LateLink()
    _, host = offload(model, link, layers=layers)
    for _ in range(2):
        ours, our_gradient = step(model, inputs)
        assert torch.equal(ours, logits)
        assert torch.equal(our_gradient, gradient)
    # Two steps, in each a wait for every layer that left and for every one that was let go and
    # came back. The last layer never leaves, and the one before it turns round in flight.
    leaving = layers or DEPTH - 1
    assert link.waits == 2 * (leaving + min(leaving, DEPTH - 2))
    assert link.out == 0
    assert host.copied_bytes > 0


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert"])
def test_recomputed_layers_are_offloaded_too(name: str) -> None:
    model = build(name)
    inputs = batch_for(model)
    _, gradient = step(model, inputs)
    _, host = offload(model, LateLink())
    step(model, inputs)
    everything = host.copied_bytes
    model = build(name)
    Checkpointing().apply(setup_for(model))
    _, host = offload(model, LateLink())
    assert torch.equal(step(model, inputs)[1], gradient)
    assert 0 < host.copied_bytes < 0.7 * everything


def test_of_recomputed_layers_only_the_inputs_travel() -> None:
    model = build("bert")
    Checkpointing().apply(setup_for(model))
    _, host = offload(model, LateLink())
    step(model, batch_for(model, rows=3, tokens=16))
    hidden = 3 * 16 * 32 * 4
    assert host.copied_bytes == (DEPTH - 1) * hidden


def test_views_of_one_storage_travel_once_and_keep_their_strides() -> None:
    device = torch.device("cpu")
    host = ActivationHost(LateLink(), device, 1)
    base = torch.randn(6, 8, requires_grad=True)
    product = base * 1.0  # a storage that is no parameter's
    expected = torch.autograd.grad((product.t()[2:] * product.t()[2:].exp()).sum(), base)[0]
    host.begin([base])
    product = base * 1.0
    seen = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(a, b)
            return a * b.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            a, b = ctx.saved_tensors
            seen.append((a.stride(), a.storage_offset(), a.untyped_storage()._cdata))
            seen.append((b.stride(), b.storage_offset(), b.untyped_storage()._cdata))
            return grad * b.exp(), grad * a * b.exp()

    hooks = host.enter(saves=True)
    assert hooks is not None
    with hooks:
        out = Notes.apply(product.t()[2:], product.t()[2:])
    strides = product.t()[2:].stride()
    del product
    for _ in range(2):
        host.enter(saves=False)
    assert host.copied_bytes == 6 * 8 * 4
    (found,) = torch.autograd.grad(out.sum(), base)
    assert torch.equal(found, expected)
    assert seen[0] == seen[1]
    assert seen[0][:2] == (strides, 2)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_packed_batches_are_offloaded(name: str) -> None:
    model = build(name)
    with PackedModel(model) as packer:
        inputs = packer.pack(batch_for(model, rows=5)).inputs()
        _, gradient = step(model, inputs)
        offload(model, LateLink())
        assert torch.equal(step(model, inputs)[1], gradient)


def test_weights_and_what_all_layers_share_stay() -> None:
    model = build("bert")
    taken: list[int] = []
    link = PlainLink(lambda tensor: taken.append(tensor.nbytes))
    setup = setup_for(model)
    ActivationOffload(min_bytes=1).attach(setup, link)
    step(model, batch_for(model, rows=3, tokens=16))
    layer = model.bert.encoder.layer[0]
    weights = {parameter.nbytes for parameter in layer.parameters() if parameter.dim() == 2}
    assert not weights & set(taken)
    mask_bytes = {3 * 16 * 16, 3 * 16 * 16 * 4}
    assert not mask_bytes & set(taken)


def test_small_tensors_stay() -> None:
    model = build("bert")
    taken: list[int] = []
    setup = setup_for(model)
    strategy = ActivationOffload(min_bytes=3 * 16 * 32 * 4)
    strategy.attach(setup, PlainLink(lambda tensor: taken.append(tensor.nbytes)))
    step(model, batch_for(model, rows=3, tokens=16))
    assert taken
    assert min(taken) == 3 * 16 * 32 * 4


def _offloaded_peak(model: Any, rows: int = 8, tokens: int = 32, **settings: Any) -> int:
    tracker = Tracker()
    link = PlainLink(lambda tensor: tracker.forget(iter([tensor])))
    setup, _ = offload(model, link, **settings)
    peak = peak_bytes(model, tracker, rows, tokens)
    setup.restore()
    return peak


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "distilbert"])
def test_the_peak_falls_to_about_two_layers(name: str) -> None:
    key = "n_layers" if name == "distilbert" else "num_hidden_layers"
    peaks = {depth: _offloaded_peak(build(name, **{key: depth})) for depth in (4, 8)}
    plain = {depth: peak_bytes(build(name, **{key: depth})) for depth in (4, 8)}
    gradients = sum(p.nbytes for p in build(name, **{key: 8}).parameters())
    gradients -= sum(p.nbytes for p in build(name, **{key: 4}).parameters())
    per_layer = (plain[8] - plain[4]) / 4
    # Deeper models need more for small tensors and gradients only.
    assert peaks[8] - peaks[4] <= gradients + 0.15 * 4 * per_layer
    assert peaks[8] < plain[8] - 4.5 * per_layer


def test_each_layer_offloaded_takes_less_memory() -> None:
    model = build("bert", num_hidden_layers=6)
    peaks = [peak_bytes(model), *(_offloaded_peak(model, layers=k) for k in range(1, 5))]
    assert all(less < more for more, less in itertools.pairwise(peaks))
    assert peak_bytes(model) == peaks[0]


def test_offloaded_inputs_of_recomputed_layers_are_the_smallest_of_all() -> None:
    model = build("bert", num_hidden_layers=12)
    offloaded = _offloaded_peak(model, 16, 64)
    Checkpointing().apply(setup_for(model))
    recomputed = peak_bytes(model, None, 16, 64)
    both = _offloaded_peak(model, 16, 64)
    hidden = 16 * 64 * 32 * 4
    # Of the twelve layer inputs two are there; the gradients that have come meanwhile are new.
    assert recomputed - 10 * hidden <= both <= recomputed - 7 * hidden
    assert both < 0.7 * offloaded


def test_a_graph_that_is_dropped_gives_everything_back() -> None:
    model = build("bert")
    link = LateLink()
    offload(model, link)
    inputs = batch_for(model)
    loss = model(**inputs).loss
    assert link.out > 0
    del loss
    gc.collect()
    assert link.out == 0
    reference = step(build("bert"), inputs)[1]
    assert torch.equal(step(model, inputs)[1], reference)


def test_two_forward_passes_before_their_backward_keep_their_own() -> None:
    model = build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    batches = [batch_for(model, seed=seed) for seed in (1, 2)]
    expected = sum(step(model, inputs)[1] for inputs in batches)
    offload(model, LateLink())
    model.zero_grad()
    losses = [model(**inputs).loss for inputs in batches]
    torch.stack(losses).sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_nothing_is_in_flight_after_a_micro_batch() -> None:
    model = build("bert")
    setup, host = offload(model, LateLink())
    (around,) = setup.around_micro_batch
    with around():
        model(**batch_for(model))  # and no backward: copies are left behind
    assert not host._moving


def test_evaluation_touches_nothing() -> None:
    model = build("bert").eval()
    link = LateLink()
    offload(model, link)
    with torch.no_grad():
        model(**batch_for(model))
    model(**batch_for(model)).loss.backward()
    assert link.waits == 0
    assert link.mark() == 0


def test_on_a_cpu_it_says_that_activations_are_there_already() -> None:
    strategy = ActivationOffload()
    setup = setup_for(build("bert"))
    assert strategy.fidelity is Fidelity.EXACT
    assert "host memory already" in strategy.unavailable(setup)
    with pytest.raises(ConfigError, match="host memory already"):
        strategy.apply(setup)
    assert not setup.undo
    on_a_card = Setup(model=setup.model, args=setup.args, device=torch.device("cuda"))
    assert strategy.unavailable(on_a_card) == ""
    assert "4 layers, not 5" in ActivationOffload(layers=5).unavailable(on_a_card)


@pytest.mark.parametrize("settings", [{"layers": 0}, {"min_bytes": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ActivationOffload(**settings)


def test_the_arena_asks_the_system_once_and_never_hands_memory_out_twice() -> None:
    asked: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    arena = Arena(allocate, chunk_bytes=4096)
    for _ in range(3):
        pieces = [arena.take(nbytes) for nbytes in (1000, 3000, 1, 5000, 4096)]
        for number, piece in enumerate(pieces):
            piece.fill_(number + 1)
        assert [piece.numel() for piece in pieces] == [1000, 3000, 1, 5000, 4096]
        assert all(bool((p == n + 1).all()) for n, p in enumerate(pieces))
        assert pieces[1].data_ptr() - pieces[0].data_ptr() == 1024
        for _piece in pieces:
            arena.give()
    assert asked == [4096, 4096, 8192, 4096]
    assert arena.reserved_bytes == 20480
