"""Trainings of seconds that many tests share: small BERTs, rows for them, and their collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

# In effective batches of 8: 5 steps an epoch, the last of 5 rows.
ROWS, STEPS_AN_EPOCH = 37, 5


def model_of(
    dropout: float = 0.1, *, seed: int = 0, **settings: Any
) -> BertForSequenceClassification:
    """BERT of 2 layers x 16, of the same weights for the same seed; dropout on as BERT trains."""
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32, "num_labels": 2,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    return BertForSequenceClassification(BertConfig(**{**defaults, **settings}))


def wide_model(dropout: float = 0.0, width: int = 128) -> BertForSequenceClassification:
    """2 layers x 128: its matrices are large to the low-bit optimizer."""
    return model_of(
        dropout, vocab_size=300, hidden_size=width, intermediate_size=2 * width,
        max_position_embeddings=48, num_labels=3,
    )  # fmt: skip


def wide_texts(rows: int = 96) -> list[dict[str, Any]]:
    """Rows of 2 to 38 tokens; each of three classes has its own third of the ids."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(rows):
        length, label = torch.randint(2, 39, (2,), generator=draw).tolist()
        ids = torch.randint(5, 95, (length,), generator=draw) + 95 * (label % 3)
        made.append({"input_ids": ids.tolist(), "labels": label % 3})
    return made


def texts(rows: int = ROWS) -> list[dict[str, Any]]:
    """Rows of 2 to 29 tokens."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(rows):
        length = int(torch.randint(2, 30, (), generator=generator))
        ids = torch.randint(5, 40, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": ids[0] % 2})
    return made


def collate(rows: Sequence[Mapping[str, Any]], side: str = "right") -> dict[str, torch.Tensor]:
    """Padded by 0, with a mask, and with labels where the rows have them."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_side=side)
    batch = {"input_ids": padded, "attention_mask": padded.ne(0).long()}
    if "labels" in rows[0]:
        batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch
