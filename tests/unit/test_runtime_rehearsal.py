"""A step tried before training tells the time and leaves no trace."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from test_against_stock import arguments, collate, model_of, texts

from memfit import BudgetTrainer
from memfit.runtime.rehearsal import rehearsed_step_seconds
from memfit.strategies import Packing


def trained(folder: Path, *, rehearsed: bool) -> dict[str, torch.Tensor]:
    model = model_of()
    model.config.hidden_dropout_prob = 0.1
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    args = arguments(folder, max_steps=4, optim="adamw_torch", learning_rate=1e-3)
    trainer = BudgetTrainer(
        model, args, train_dataset=texts(80), data_collator=collate, strategies=[Packing()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if rehearsed:
        assert 0 < rehearsed_step_seconds(trainer) < 60
        assert all(parameter.grad is None for parameter in model.parameters())
    trainer.train()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_rehearsed_run_ends_with_the_weights_of_one_that_was_not(tmp_path):
    torch.manual_seed(7)
    plain = trained(tmp_path, rehearsed=False)
    torch.manual_seed(7)
    rehearsed = trained(tmp_path, rehearsed=True)
    assert all(torch.equal(plain[name], rehearsed[name]) for name in plain)
