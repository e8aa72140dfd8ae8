"""Tiny models, rows and set-ups for the tests of single strategies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor

from memfit import BudgetTrainer, TrainingArguments
from memfit.strategies import Setup, Strategy
from small_training import collate

VOCABULARY = 60
CLS, SEP = 2, 3
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "num_labels": 2}
BERT_LIKE: dict[str, Any] = {
    **COMMON, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 40,
}  # fmt: skip
ROBERTA_LIKE = {**BERT_LIKE, "type_vocab_size": 1, "pad_token_id": 0}
MODERNBERT: dict[str, Any] = {
    **BERT_LIKE, "local_attention": 8, "pad_token_id": 0, "cls_token_id": CLS,
    "sep_token_id": SEP, "bos_token_id": CLS, "eos_token_id": SEP,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT_LIKE),
    "ernie": ("Ernie", BERT_LIKE),
    "electra": ("Electra", {**BERT_LIKE, "embedding_size": 16}),
    "roberta": ("Roberta", ROBERTA_LIKE),
    "xlm-roberta": ("XLMRoberta", ROBERTA_LIKE),
    "albert": ("Albert", {**BERT_LIKE, "embedding_size": 16}),
    "distilbert": (
        "DistilBert",
        {**COMMON, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48,
         "max_position_embeddings": 40},
    ),
    "modernbert-mean": ("ModernBert", {**MODERNBERT, "classifier_pooling": "mean"}),
    "modernbert-cls": ("ModernBert", {**MODERNBERT, "classifier_pooling": "cls"}),
    "mpnet": ("MPNet", {**BERT_LIKE, "pad_token_id": 0}),
    "deberta-v2": (
        "DebertaV2",
        {**BERT_LIKE, "pad_token_id": 0, "relative_attention": True, "position_buckets": 16,
         "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3},
    ),
}  # fmt: skip


def build(family: str = "bert", seed: int = 0, noise: float = 0.05, **changes: Any) -> Any:
    """A tiny classifier of a family, its weights large enough for texts to differ."""
    prefix, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


def frozen(family: str = "bert", **changes: Any) -> Any:
    """The same with its encoder frozen, as the tutorials' loop does it."""
    model = build(family, **changes)
    getattr(model, model.base_model_prefix).requires_grad_(False)
    return model


def count_calls(model: Any) -> list[int]:
    """How often the layers of a BERT are run, in a list of one number."""
    calls = [0]

    def note(*_: Any) -> None:
        calls[0] += 1

    model.bert.encoder.layer[0].register_forward_hook(note)
    return calls


def rows_of(
    count: int, longest: int = 30, seed: int = 1, share: float = 0.5
) -> list[dict[str, Any]]:
    """Texts of a special token, some tokens and a special token, unpadded.

    Rows of label 1, about this share, are made of the upper half of the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    middle = VOCABULARY // 2
    rows = []
    for _ in range(count):
        length = int(torch.randint(1, longest - 1, (), generator=generator))
        label = int(torch.rand((), generator=generator) < share)
        low, high = (middle, VOCABULARY) if label else (5, middle)
        text = torch.randint(low, high, (length,), generator=generator).tolist()
        rows.append({"input_ids": [CLS, *text, SEP], "labels": label})
    return rows


def arguments(folder: Any, **fields: Any) -> TrainingArguments:
    """For a CPU, without checkpoints and without noise in the log."""
    defaults = {
        "per_device_train_batch_size": 8, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**defaults, **fields})


def setup_of(model: Any, folder: Any = "unused", **fields: Any) -> Setup:
    """What a strategy gets, on the CPU."""
    return Setup(model, arguments(folder, **fields), torch.device("cpu"))


def state_of(model: Any) -> dict[str, tuple[Tensor, bool]]:
    """All weights, and which of them learn."""
    return {name: (one.clone(), one.requires_grad) for name, one in model.named_parameters()}


def same_state(one: dict[str, tuple[Tensor, bool]], other: dict[str, tuple[Tensor, bool]]) -> bool:
    """Same names in the same order, bits and learning."""
    return list(one) == list(other) and all(
        torch.equal(one[name][0], other[name][0]) and one[name][1] == other[name][1] for name in one
    )


def learning(model: Any) -> set[str]:
    """The names of the weights that learn."""
    return {name for name, one in model.named_parameters() if one.requires_grad}


class SetupTrainer(BudgetTrainer):
    """BudgetTrainer on a set-up: its model, its arguments and what it loads instead."""

    def __init__(self, setup: Setup, **named: Any) -> None:
        self.prepared = setup
        super().__init__(setup.model, setup.args, **named)
        self.remove_callback(transformers.PrinterCallback)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.data_collator
        dataset, self.data_collator = self.prepared.data_for(dataset, own)
        try:
            return super()._get_dataloader(dataset, *args, **kwargs)
        finally:
            self.data_collator = own


def trained(
    setup: Setup, strategies: Iterable[Strategy], rows: list[dict[str, Any]], **named: Any
) -> SetupTrainer:
    """Apply the strategies in this order and train."""
    setup.train_dataset = rows
    for strategy in strategies:
        assert strategy.unavailable(setup) == ""
        strategy.apply(setup)
    trainer = SetupTrainer(setup, train_dataset=rows, data_collator=collate, **named)
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    """The loss of every step that was logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def kept_bytes(setup: Setup, *strategies: Strategy) -> int:
    """What autograd keeps for the backward of the run's steps, weights left out."""
    weights = {one.untyped_storage().data_ptr() for one in setup.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trained(setup, strategies, rows_of(8))
    return sum(size for address, size in kept.items() if address not in weights)
