"""The example of docs/adding-a-strategy.md trains as it stands on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.strategies import Fidelity, LowBitAdamW
from small_training import collate, model_of, texts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-strategy.md"
MOMENTUM = 0.8


@pytest.fixture(scope="module")
def kind() -> Any:
    """The class of the page."""
    (block,) = re.findall(r"```python\n(\"\"\".*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "on_the_page"}
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names["MomentumSgd"]


def arguments(folder: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=7, learning_rate=0.05, use_cpu=True,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip


def test_the_strategy_trains_as_torchs_optimizer_in_the_stock_trainer(
    kind: Any, tmp_path: Path
) -> None:
    rows, stock_model, model = texts(), model_of(0.0), model_of(0.0)
    ours = BudgetTrainer(
        model, arguments(tmp_path), train_dataset=rows, data_collator=collate,
        strategies=[kind(MOMENTUM)], micro_batching=MicroBatching(max_rows=3),
    )  # fmt: skip
    ours.train()
    sgd = torch.optim.SGD(stock_model.parameters(), lr=0.05, momentum=MOMENTUM)
    stock = transformers.Trainer(
        stock_model, arguments(tmp_path), train_dataset=rows, data_collator=collate,
        optimizers=(sgd, None),
    )  # fmt: skip
    stock.train()
    for (name, mine), theirs in zip(
        model.named_parameters(), stock_model.parameters(), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5), name
    assert not torch.allclose(model.classifier.weight, model_of(0.0).classifier.weight, atol=1e-3)


def test_it_says_what_it_is_and_what_it_cannot_stand_beside(kind: Any, tmp_path: Path) -> None:
    made = kind()
    assert (made.name, made.momentum, made.fidelity) == ("momentum_sgd", 0.9, Fidelity.OPTIMIZER)
    assert made.explain(None) == "SGD with a momentum of 0.9"
    with pytest.raises(ConfigError, match="momentum_sgd"):
        BudgetTrainer(
            model_of(0.0), arguments(tmp_path), train_dataset=texts(), data_collator=collate,
            strategies=[LowBitAdamW(), made],
        ).train()  # fmt: skip
