"""Sharded optimizer state: who keeps what, and what an optimizer then does.

What ranks send each other is in tests/faults/test_several_ranks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_fixtures import build, setup_of
from torch import nn
from torch.optim import Optimizer

from memfit.engine.exchange import Peers
from memfit.errors import ConfigError
from memfit.strategies import Setup, ShardedState
from memfit.strategies.lowbit.lowbit_optimizer import LowBitOptimizer
from memfit.strategies.sharded_state import StateShares, owners
from memfit.training.guard.updates import allocate_state

RANKS = 3


def setup_on(rank: int, folder: Path, ranks: int = RANKS) -> Setup:
    setup = setup_of(build(), folder)
    setup.ranks = Peers(rank, ranks)
    return setup


def shares_on(rank: int, folder: Path) -> StateShares:
    setup = setup_on(rank, folder)
    ShardedState().apply(setup)
    assert setup.state_shares is not None
    return setup.state_shares


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    for number, p in enumerate(parameters):
        p.grad = torch.full_like(p, 0.1 + number / 100)
    return parameters


def state_bytes(optimizer: Optimizer) -> int:
    states: Any = optimizer.state.values()
    return sum(one.nbytes for state in states for one in state.values() if one.dim() > 0)


def test_weights_are_dealt_by_size_and_alike_on_every_rank() -> None:
    sizes = (50, 7, 30, 20, 1, 40, 2)
    params = [torch.zeros(size) for size in sizes]
    found = owners(params, 2)
    held = [sum(p.numel() for p in params if found[p] == rank) for rank in range(2)]
    assert held == [50 + 20 + 7, 40 + 30 + 2 + 1]
    assert owners(params, 2) == found
    # One weight has one owner.
    assert set(owners([torch.zeros(90), torch.zeros(10)], 4).values()) == {0, 1}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
def test_each_rank_keeps_and_updates_its_share(kind: type[Optimizer], tmp_path: Path) -> None:
    plain = build()
    parameters = with_gradients(plain)
    optimizer: Any = kind(parameters, lr=0.1)  # type: ignore[call-arg]
    optimizer.step()
    whole_bytes, expected = state_bytes(optimizer), [p.detach() for p in parameters]
    updated: list[set[int]] = []
    kept_bytes = []
    for rank in range(RANKS):
        shares, model = shares_on(rank, tmp_path), build()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        shares.divide(optimizer)
        assert allocate_state(optimizer, shares.keeps)
        kept_bytes.append(state_bytes(optimizer))
        parameters = with_gradients(model)
        with shares._ranks.apart():
            optimizer.step()
        assert state_bytes(optimizer) == kept_bytes[-1]
        moved = {i for i, p in enumerate(parameters) if not torch.equal(p, before[i])}
        assert moved == {i for i, p in enumerate(parameters) if p.grad is not None}
        assert all(torch.equal(parameters[i], expected[i]) for i in moved)
        updated.append(moved)
    assert sorted(i for moved in updated for i in moved) == list(range(len(parameters)))
    assert sum(kept_bytes) == whole_bytes
    assert max(kept_bytes) == pytest.approx(whole_bytes / RANKS, rel=0.1)


def test_a_rank_loads_its_share_of_a_whole_state(tmp_path: Path) -> None:
    whole = torch.optim.AdamW(with_gradients(build()))
    whole.step()
    saved = whole.state_dict()
    loaded: dict[int, Any] = {}
    for rank in range(RANKS):
        shares, model = shares_on(rank, tmp_path), build()
        optimizer = torch.optim.AdamW(model.parameters())
        shares.divide(optimizer)
        optimizer.load_state_dict(saved)
        mine = optimizer.state_dict()["state"]
        assert not loaded.keys() & mine.keys()
        loaded |= mine
    assert loaded.keys() == saved["state"].keys()
    for index, state in saved["state"].items():
        assert torch.equal(loaded[index]["exp_avg"], state["exp_avg"])
    assert len(saved["state"]) == len(loaded), "what was saved is left as it was"


def test_a_parameter_that_learns_later_is_updated_by_all(tmp_path: Path) -> None:
    shares, model = shares_on(1, tmp_path), build()
    late = model.classifier.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares.divide(optimizer)
    late.requires_grad_(True)
    late.grad = torch.ones_like(late)
    before = late.detach().clone()
    with shares._ranks.apart():
        optimizer.step()
    assert not torch.equal(late, before)


def test_an_optimizer_that_sees_all_weights_at_once_is_refused(tmp_path: Path) -> None:
    class Own(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    for optimizer in (torch.optim.LBFGS(build().parameters()), Own(build().parameters())):
        with pytest.raises(ConfigError, match=f"used with {type(optimizer).__name__}: its update"):
            shares_on(0, tmp_path).divide(optimizer)


def test_where_it_has_no_use_it_says_why(tmp_path: Path) -> None:
    alone = setup_on(0, tmp_path, ranks=1)
    assert ShardedState().unavailable(alone) == "it needs several processes; see --gpus"
    several = setup_on(0, tmp_path)
    assert ShardedState().unavailable(several) == ""
    several.args.optim = "lion_32bit"
    expected = "an update by optim='lion_32bit' may look at all weights at once"
    assert ShardedState().unavailable(several) == expected


def test_undone_nothing_is_shared(tmp_path: Path) -> None:
    setup = setup_on(0, tmp_path)
    ShardedState().apply(setup)
    assert setup.state_shares is not None
    setup.restore()
    assert setup.state_shares is None


def test_low_bit_state_is_made_and_loaded_for_the_share_alone(tmp_path: Path) -> None:
    def made(shares: StateShares | None) -> LowBitOptimizer:
        optimizer = LowBitOptimizer(build().parameters(), lr=0.1, small_numel=100)
        if shares is not None:
            shares.divide(optimizer)
        optimizer.init_state()
        return optimizer

    whole = made(None)
    for p in whole.large:
        whole.state[p]["moment1"].random_(-9, 9)
    saved = whole.state_dict()
    kept_bytes, found = 0, set()
    for rank in range(RANKS):
        optimizer = made(shares_on(rank, tmp_path))
        optimizer.load_state_dict(saved)
        for index, (p, source) in enumerate(zip(optimizer.large, whole.large, strict=True)):
            assert (p in optimizer.state) == optimizer.keeps(p)
            if optimizer.keeps(p):
                found.add(index)
                loaded = optimizer.state[p]["moment1"]
                assert torch.equal(loaded, whole.state[source]["moment1"])
        kept_bytes += optimizer.state_bytes()
    small_bytes = whole.state_bytes() - sum(
        one.nbytes for p in whole.large for one in whole.state[p].values()
    )
    assert found == set(range(len(whole.large)))
    assert kept_bytes == whole.state_bytes() + (RANKS - 1) * small_bytes
