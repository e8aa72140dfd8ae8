"""Fully sharded training: refusals, saving and loading, in a group of one rank.

Trainings on several ranks are in tests/faults/test_several_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategy_fixtures import build, setup_of
from torch import Tensor, nn

from memfit.errors import ConfigError
from memfit.memory.cards import find_card
from memfit.strategies import FullySharded, Setup
from memfit.strategies.fully_sharded import gathered, is_divided, optimizer_parts
from memfit.training.guard.updates import allocate_state
from small_training import collate, model_of, texts


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def setup_on_ranks(folder: Path, model: nn.Module | None = None) -> Setup:
    setup = setup_of(build() if model is None else model, folder)
    setup.ranks = 2
    setup.train_dataset = texts(4)
    return setup


def test_one_process_is_refused(tmp_path: Path) -> None:
    setup = setup_on_ranks(tmp_path)
    setup.ranks = 1
    with pytest.raises(ConfigError, match="over several processes, and there is one"):
        FullySharded().apply(setup)


def test_gloo_and_fp16_on_a_card_are_refused(tmp_path: Path) -> None:
    setup = setup_on_ranks(tmp_path)
    setup.card, setup.args.ddp_backend = find_card("T4"), "gloo"
    assert "gloo cannot gather weights on a GPU" in FullySharded().unavailable(setup)
    setup.args.ddp_backend = None
    assert FullySharded().unavailable(setup) == ""
    setup.args.fp16 = True
    assert "fp16 scales the loss" in FullySharded().unavailable(setup)


def test_weights_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not all float32"):
        FullySharded().apply(setup_on_ranks(tmp_path, build().bfloat16()))


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear is no transformers model"):
        FullySharded().apply(setup_on_ranks(tmp_path, nn.Linear(2, 2)))


def test_another_strategys_optimizer_is_refused(tmp_path: Path) -> None:
    setup = setup_on_ranks(tmp_path)
    setup.make_optimizer = lambda groups, _: torch.optim.SGD(groups)
    with pytest.raises(ConfigError, match="brings its own optimizer"):
        FullySharded().apply(setup)


def answers(model: nn.Module) -> Tensor:
    batch = collate(texts(5))
    found: Tensor = model.eval()(**batch).logits.detach()
    return found


def divided(model: nn.Module, folder: Path) -> nn.Module:
    setup = setup_on_ranks(folder, model)
    FullySharded().apply(setup)
    assert setup.sharded
    assert all(is_divided(p) for p in model.parameters())
    return model


@pytest.mark.usefixtures("group")
def test_a_weight_of_two_modules_stays_one(tmp_path: Path) -> None:
    model: Any = model_of()
    model.decoder = nn.Linear(16, 40, bias=False)
    model.decoder.weight = model.get_input_embeddings().weight
    before = answers(model)
    divided(model, tmp_path)
    assert torch.equal(answers(model), before)
    assert model.decoder.weight is model.get_input_embeddings().weight


@pytest.mark.usefixtures("group")
def test_whole_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = model_of()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    saved = gathered(divided(model, tmp_path).state_dict())
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], value) for name, value in whole.items())
    doubled = {name: value * 2 for name, value in whole.items()}
    model.load_state_dict(doubled)
    assert all(is_divided(p) for p in model.parameters())
    assert all(torch.equal(p.full_tensor(), doubled[name]) for name, p in model.named_parameters())


@pytest.mark.usefixtures("group")
def test_an_optimizer_saves_and_loads_whole_state(tmp_path: Path) -> None:
    model = divided(model_of(), tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    assert allocate_state(optimizer)
    moments: Any = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(is_divided(one) for one in moments)
    for number, one in enumerate(moments):
        one.fill_(number)
    saved = gathered(optimizer.state_dict())
    plain = torch.optim.AdamW(model_of().parameters())
    plain.load_state_dict(saved)
    for number, (p, state) in enumerate(plain.state.items()):
        assert torch.equal(state["exp_avg"], torch.full_like(p, number))
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer_parts(other, plain.state_dict()))
    for number, (_, state) in enumerate(other.state.items()):
        assert is_divided(state["exp_avg"])
        assert bool((state["exp_avg"].to_local() == number).all())
        assert float(state["step"]) == 0
