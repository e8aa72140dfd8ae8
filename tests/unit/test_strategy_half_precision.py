"""Autocast: where it can be had, what it changes, and what it must not."""

from __future__ import annotations

import pytest
import torch
from strategy_fixtures import build, kept_bytes, losses, rows_of, setup_of, trained

from memfit.errors import ConfigError
from memfit.strategies import Fidelity, HalfPrecision
from memfit.strategies.half_precision import has_fast_bf16

needs_no_note = pytest.mark.filterwarnings("ignore:this CPU has no bfloat16")


@needs_no_note
def test_bfloat16_products_run_in_bfloat16_and_weights_stay_float32(tmp_path):
    seen = set()
    model = build()
    model.classifier.register_forward_hook(lambda _m, _a, output: seen.add(output.dtype))
    setup = setup_of(model, tmp_path, max_steps=6, learning_rate=5e-3)
    trainer = trained(setup, [HalfPrecision()], rows_of(8))
    assert seen == {torch.bfloat16}
    assert {one.dtype for one in trainer.model.parameters()} == {torch.float32}
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert HalfPrecision().fidelity is Fidelity.ROUNDING


@needs_no_note
def test_bfloat16_losses_are_those_of_float32_within_rounding(tmp_path):
    found = []
    for strategies in ([], [HalfPrecision()]):
        model = build(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        setup = setup_of(model, tmp_path, max_steps=5, learning_rate=1e-3)
        found.append(losses(trained(setup, strategies, rows_of(16))))
    assert found[0] != found[1]
    assert found[1] == pytest.approx(found[0], rel=2e-2)


@needs_no_note
def test_less_is_kept_for_backward(tmp_path):
    plain = kept_bytes(setup_of(build(), tmp_path, max_steps=1))
    half = kept_bytes(setup_of(build(), tmp_path, max_steps=1), HalfPrecision())
    assert half < 0.9 * plain


@needs_no_note
def test_undo_gives_the_arguments_back():
    setup = setup_of(build())
    HalfPrecision().apply(setup)
    assert (setup.args.bf16, setup.args.mixed_precision) == (True, "bf16")
    setup.restore()
    assert (setup.args.bf16, setup.args.mixed_precision) == (False, "no")


def test_a_cpu_without_bfloat16_instructions_is_told_what_it_gets(monkeypatch):
    monkeypatch.setattr("memfit.strategies.half_precision.has_fast_bf16", lambda: False)
    with pytest.warns(UserWarning, match="activations shrink, but steps take longer"):
        HalfPrecision().apply(setup_of(build()))
    assert isinstance(has_fast_bf16(), bool)


def test_float16_on_a_cpu_is_refused_with_what_to_take_instead():
    setup = setup_of(build())
    reason = HalfPrecision("float16").unavailable(setup)
    assert reason == ("float16 has no effect on a CPU: the Trainer runs in float32; take bfloat16")
    with pytest.raises(ConfigError, match="no effect on a CPU"):
        HalfPrecision("float16").apply(setup)
    assert setup.args.fp16 is False


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((7, 5), "bfloat16", "a card of compute capability 7.5 has no bfloat16"),
        ((7, 5), "float16", ""),
        ((8, 0), "bfloat16", ""),
        ((9, 0), "float16", ""),
    ],
)
def test_a_cards_capability_decides(monkeypatch, capability, dtype, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    setup = setup_of(build())
    setup.device = torch.device("cuda:0")
    found = HalfPrecision(dtype).unavailable(setup)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    if reason:
        assert found.endswith("take float16")


def test_a_precision_the_user_chose_stands():
    assert HalfPrecision().unavailable(setup_of(build(), bf16=True)) == "bf16=True is set already"
    half = setup_of(build().to(torch.bfloat16))
    assert "the weights are bfloat16" in HalfPrecision().unavailable(half)


def test_only_the_two_half_types_are_known():
    with pytest.raises(ConfigError, match="'bfloat16' or 'float16', not 'float8'"):
        HalfPrecision("float8")  # type: ignore[arg-type]


def test_a_device_nobody_tried_is_refused():
    setup = setup_of(build())
    setup.device = torch.device("hpu")
    assert "has not been tried on hpu" in HalfPrecision().unavailable(setup)
    setup.device = torch.device("xpu")
    assert HalfPrecision().unavailable(setup) == ""
