"""Whatever the planner may choose is saved, resumed and exported: every pair of strategies.

What is meant for a card runs here on the CPU's memory where it can: the same state, the same
arenas, the same files. Graphs and workspaces are a card's own, in tests/gpu/test_saving_gpu.py.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch

from memfit.strategies import ORDER, Lora, LowBitAdamW, Strategy
from saved_training import STEPS, exported, logits_of, losses, trained
from strategy_combinations import (
    CUDA_ONLY,
    Combination,
    covering_pairs,
    every_combination,
    name_of,
)

CLIP = 1.0
SLICES = 12
SEVERAL_RANKS = frozenset({"fully_sharded"})
"""Saved and resumed in tests/faults/test_several_ranks.py."""


@functools.cache
def covering() -> list[tuple[Combination, float]]:
    """The combinations, and at which norm each is clipped; the planner takes seconds to name them.

    Those without clipping have what only such a training may choose.
    """
    clipped = covering_pairs(every_combination(CLIP, without=CUDA_ONLY))
    known = {one for each in clipped for one in each}
    more = {each for each in every_combination(0.0, without=CUDA_ONLY) if set(each) - known}
    return [*((each, CLIP) for each in clipped), *((each, 0.0) for each in covering_pairs(more))]


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner has found each of them to work on a card; here they are not asked again."""
    monkeypatch.setattr(Strategy, "apply", lambda self, setup: self.change(setup))


def test_every_strategy_is_saved_here_or_on_a_card() -> None:
    here = {one.name for each, _ in covering() for one in each}
    # A model's attention is fused where nothing can be packed: it has no state.
    elsewhere = {"fused_attention", *SEVERAL_RANKS}
    assert here | CUDA_ONLY | elsewhere == {kind.name for kind in ORDER}


@pytest.mark.parametrize("number", range(SLICES))
def test_each_is_saved_resumed_and_exported(tmp_path: Path, number: int) -> None:
    assert len(covering()) >= SLICES
    for strategies, clip in covering()[number::SLICES]:
        name = name_of(strategies)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        whole = trained(folder / "run", strategies, clip=clip, use_cpu=True)
        assert whole.state.global_step == STEPS, name
        weights = exported(whole, folder / "whole")
        expected = torch.as_tensor(whole.predict(whole.train_dataset).predictions)
        resumed = trained(folder / "run", strategies, clip=clip, resume=True, use_cpu=True)
        assert losses(resumed) == losses(whole), name
        again = exported(resumed, folder / "resumed")
        assert all(torch.equal(again[one], weights[one]) for one in weights), name
        assert all(value.dtype == torch.float32 for value in weights.values()), name
        assert (logits_of(folder / "whole") - expected).abs().max() < 0.05, name


@pytest.mark.parametrize("beside", [(), (Lora(),)], ids=["all weights", "adapters"])
def test_the_best_models_masters_are_those_of_its_checkpoint(
    tmp_path: Path, beside: Combination
) -> None:
    """It is loaded into the weights that were trained, with the optimizer's part of them."""
    strategies = (*beside, LowBitAdamW())
    first_is_best = itertools.count(0, -1)
    trainer = trained(
        tmp_path / "run", strategies, use_cpu=True, save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, metric_for_best_model="rank",
        greater_is_better=True, lr_scheduler_type="constant",
        compute_metrics=lambda _: {"rank": next(first_is_best)},
    )  # fmt: skip
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-1")
    weights = exported(trainer, tmp_path / "best")
    one = {"max_steps": 1, "lr_scheduler_type": "constant", "use_cpu": True}
    expected = exported(trained(tmp_path / "one", strategies, **one), tmp_path / "expected")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    # They have more bits than the weights that were trained with.
    assert any(not torch.equal(value, value.bfloat16().float()) for value in weights.values())
