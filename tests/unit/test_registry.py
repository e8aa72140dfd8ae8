"""The order of strategies, memfit's own and a user's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from memfit import BudgetTrainer, TrainingArguments
from memfit.errors import ConfigError
from memfit.strategies import (
    Checkpointing,
    CudaGraphs,
    Fidelity,
    GradientRelease,
    LowBitAdamW,
    Packing,
    Setup,
    SmallWorkspace,
    Strategy,
    by_name,
    ordered,
)
from small_training import collate, model_of, texts


@dataclass(frozen=True, slots=True)
class MomentumSgd(Strategy):
    """SGD with momentum: one moment instead of two."""

    name = "momentum_sgd"
    reason = "one moment instead of two"
    shrinks = ("optimizer",)
    momentum: float = 0.9

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.OPTIMIZER

    def change(self, setup: Setup) -> None:
        setup.make_optimizer = lambda groups, args: torch.optim.SGD(
            groups, lr=args.learning_rate, momentum=self.momentum
        )


def test_a_users_strategy_comes_after_memfits_and_before_the_step_as_a_whole() -> None:
    own, graphs, low = MomentumSgd(), CudaGraphs(), LowBitAdamW()
    assert ordered([graphs, own, SmallWorkspace(), low]) == [low, own, SmallWorkspace(), graphs]


def test_a_users_strategy_trains(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=2, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = BudgetTrainer(
        model_of(), args, collate, texts(), strategies=[MomentumSgd(0.5), Packing()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert trainer.optimizer is not None
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'checkpointing'"):
        by_name("checkpointin")


def test_the_same_strategy_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'checkpointing' is given twice"):
        ordered([Checkpointing(1), Checkpointing(2)])


@pytest.mark.parametrize("mode", ["two_pass", "release"])
def test_modes_that_are_gone_say_what_to_take(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"instead of '{mode}' take 'kept8'"):
        GradientRelease(mode)  # type: ignore[arg-type]
