"""The training step to be priced: plain values, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memfit.errors import ConfigError, nearest
from memfit.messages import N_, t

PRECISIONS = ("fp32", "bf16", "fp16", "pure_bf16", "pure_fp16")
"""`bf16` and `fp16` are autocast over fp32 weights; `pure_*` load the weights in that type."""

OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_torch_8bit",
    "adamw_bnb_8bit",
    "adafactor",
    "sgd",
    "flash_adamw",
)

PROBLEM_TYPES = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)

_AT_LEAST_ONE = {
    "rows": N_("the batch size"),
    "length": N_("the max length"),
    "num_labels": N_("the number of labels"),
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One optimizer step of the stock Trainer: what decides every byte of it."""

    config: Any
    """What `config.json` holds, as a mapping, or a transformers configuration."""
    rows: int
    """Rows of one device batch: `per_device_train_batch_size`."""
    length: int
    """Tokens of every row, padding included."""
    num_labels: int = 2
    problem_type: str = "single_label_classification"
    precision: str = "fp32"
    optim: str = "adamw_torch_fused"
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    freeze: str | None = None
    """`encoder` (the whole base model), `embeddings`, or N: the embeddings and N layers."""
    lora: int | None = None
    """The rank of LoRA adapters on the attention's query and value projections."""
    lora_dropout: float = 0.05
    attn_implementation: str | None = None
    padded: bool | None = None
    """Whether the attention mask hides anything. None: yes, unless the batch is one row."""
    max_grad_norm: float = 1.0
    eval_rows: int | None = None
    """Rows of an evaluation batch; None: as many as `rows`."""
    eval_length: int | None = None

    def __post_init__(self) -> None:
        _known("precision", self.precision, PRECISIONS)
        _known("optim", self.optim, OPTIMIZERS)
        _known("problem_type", self.problem_type, PROBLEM_TYPES)
        for name, words in _AT_LEAST_ONE.items():
            if getattr(self, name) < 1:
                raise ConfigError(
                    t(
                        "{what} is {value}; it must be at least 1",
                        what=t(words),
                        value=getattr(self, name),
                    )
                )
        if self.lora is not None and self.freeze is not None:
            raise ConfigError(
                t("--lora freezes all but its adapters and the head already; leave --freeze out")
            )
        if self.freeze not in (None, "encoder", "embeddings") and not self.freeze.isdecimal():
            raise ConfigError(
                t(
                    "cannot freeze {freeze}; write encoder, embeddings or a number of layers",
                    freeze=repr(self.freeze),
                )
            )

    @property
    def has_padding(self) -> bool:
        """A single row is as long as itself, so dynamic padding hides nothing of it."""
        return self.rows > 1 if self.padded is None else self.padded

    @property
    def autocast(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.precision in ("bf16", "fp16")

    @property
    def dtype(self) -> str:
        """The weights' type, as torch spells it."""
        return {"pure_bf16": "bfloat16", "pure_fp16": "float16"}.get(self.precision, "float32")

    @property
    def autocast_dtype(self) -> str:
        """The type autocast computes in, as torch spells it."""
        return "float16" if self.precision == "fp16" else "bfloat16"

    def replace(self, **changes: Any) -> StepSpec:
        """The same step with some values changed."""
        return dataclasses.replace(self, **changes)


def _known(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            t(
                "{name} {value} is not one of {choices}.{hint}",
                name=name,
                value=repr(value),
                choices=", ".join(allowed),
                hint=nearest(value, allowed),
            )
        )
