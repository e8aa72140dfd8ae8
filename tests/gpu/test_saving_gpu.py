"""Whatever the planner may choose for a card is saved, resumed and exported there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from memfit.strategies import GradientRelease, LowBitAdamW, OptimizerOffload, Packing, StateOffload
from saved_training import SAVED_AT, STEPS, exported, logits_of, losses, trained
from strategy_combinations import Combination, covering_pairs, every_combination, name_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20
CLIP = 1.0


def _cases() -> list[Any]:
    """Every pair of strategies, graphs among them; what needs a card is not asked without one."""
    if not torch.cuda.is_available():
        return []
    small = torch.cuda.get_device_capability() < (9, 0)  # its workspaces are small already
    without = frozenset({"small_workspace"}) if small else frozenset()
    clipped = covering_pairs(every_combination(CLIP, without=without))
    known = {one for each in clipped for one in each}
    unclipped = {each for each in every_combination(0.0, without=without) if set(each) - known}
    return [
        pytest.param(each, clip, id=name_of(each))
        for clip, chosen in ((CLIP, clipped), (0.0, covering_pairs(unclipped)))
        for each in chosen
    ]


class Loaded(TrainerCallback):
    """Keeps the optimizer's state as it is when training goes on."""

    state: dict[str, Any]

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        self.state = torch.load(file, map_location="cpu", weights_only=True)


def tensors_of(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a state, by where it stands."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        if isinstance(value, (dict, list, tuple, torch.Tensor)):
            found |= tensors_of(value, f"{path}/{key}")
    return found


@pytest.mark.parametrize(("strategies", "clip"), _cases())
def test_it_is_saved_resumed_and_exported(
    tmp_path: Path, strategies: Combination, clip: float
) -> None:
    whole = trained(tmp_path / "run", strategies, clip=clip, dropout=0.0)
    assert whole.state.global_step == STEPS
    expected = torch.as_tensor(whole.predict(whole.train_dataset).predictions)
    exported(whole, tmp_path / "whole")
    whole_losses = losses(whole)
    whole.setup.restore()
    del whole
    loaded = Loaded()
    resumed = trained(
        tmp_path / "run", strategies, clip=clip, resume=True, dropout=0.0, callbacks=[loaded]
    )
    # The state that training goes on with is the file's, bit for bit.
    saved = torch.load(
        tmp_path / "run" / f"checkpoint-{SAVED_AT}" / "optimizer.pt",
        map_location="cpu",
        weights_only=True,
    )
    stored, there = tensors_of(saved), tensors_of(loaded.state)
    assert stored.keys() == there.keys()
    for name, value in stored.items():
        assert value.dtype == there[name].dtype, name
        assert torch.equal(value, there[name]), name
    # Attention adds up in another order each time: the same, as far as two runs are.
    assert losses(resumed) == pytest.approx(whole_losses, abs=5e-3)
    resumed.setup.restore()
    assert (logits_of(tmp_path / "whole") - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    "strategies",
    [
        (Packing(), LowBitAdamW(), GradientRelease("kept8"), StateOffload()),
        (Packing(), LowBitAdamW(16), GradientRelease("kept8"), StateOffload(gradients=True)),
        (Packing(), OptimizerOffload(dtype="bfloat16")),
        (Packing(), OptimizerOffload(weights=True)),
    ],
    ids=name_of,
)
def test_state_in_host_memory_is_saved_and_loaded_without_the_card(
    tmp_path: Path, strategies: Combination
) -> None:
    trainer = trained(tmp_path / "run", strategies, dropout=0.0)
    optimizer: Any = trainer.optimizer
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < MIB
    trainer.setup.restore()
