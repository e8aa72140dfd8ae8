"""The stock Trainer's step: its settings, its optimizer, and how it runs.

Where the real one runs on fake tensors it is used. Those of bitsandbytes, torchao and
flashoptim need their CUDA kernels to step; for them the state they keep is laid out here.

Forward under autocast, backward, clipping, optimizer, gradients dropped. The same code
runs on fake tensors for a prediction and on real CPU tensors to check it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, t
from memfit.memory.components import Component
from memfit.memory.tracing.tracker import Tracker

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
                    "{what} is {value}; it must be at least 1",
                    what=t(words),
                    value=getattr(self, name),
                )
        if self.lora is not None and self.freeze is not None:
            raise ConfigError(
                "--lora freezes all but its adapters and the head already; leave --freeze out"
            )
        if self.freeze not in (None, "encoder", "embeddings") and not self.freeze.isdecimal():
            raise ConfigError(
                "cannot freeze {freeze}; write encoder, embeddings or a number of layers",
                freeze=repr(self.freeze),
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
            "{name} {value} is not one of {choices}.{hint}",
            name=name,
            value=repr(value),
            choices=", ".join(allowed),
            hint=nearest(value, allowed),
        )


# transformers.Trainer.get_decay_parameter_names: biases and norms do not decay. Each of the
# two groups is stepped by itself, so the foreach temporaries of one are gone before the other.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def make_optimizer(spec: StepSpec, model: torch.nn.Module, *, cuda: bool) -> torch.optim.Optimizer:
    """The optimizer the Trainer would make for these arguments."""
    groups = parameter_groups(model)
    if spec.optim == "adafactor":
        from transformers.optimization import Adafactor

        make: Callable[..., torch.optim.Optimizer] = Adafactor
        return make(groups, lr=5e-5, scale_parameter=False, relative_step=False)
    if spec.optim == "sgd":
        return torch.optim.SGD(groups, lr=5e-5, foreach=cuda)
    if spec.optim in _LAYOUTS:
        return StateOnly(groups, _LAYOUTS[spec.optim], embeddings=_embeddings(model))
    fused = spec.optim == "adamw_torch_fused"
    return torch.optim.AdamW(groups, lr=5e-5, fused=fused, foreach=cuda and not fused)


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """What learns, in the Trainer's two groups: with and without weight decay."""
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            chosen = plain if name in norms or _NO_DECAY.search(name) else decayed
            chosen.append(parameter)
    return [{"params": decayed, "weight_decay": 0.0}, {"params": plain, "weight_decay": 0.0}]


def state_tensors(optimizer: torch.optim.Optimizer, *, host: bool) -> Iterator[torch.Tensor]:
    """The optimizer's state; with `host`, the step counters that lie on the CPU instead."""
    on_device = any(group.get("fused") for group in optimizer.param_groups)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and host == (key == "step" and not on_device):
                yield value


Layout = Callable[[torch.Tensor, bool], list[torch.Tensor]]


class StateOnly(torch.optim.Optimizer):
    """Keeps the state of an optimizer whose kernels need a GPU; its step updates nothing."""

    def __init__(
        self, params: Any, layout: tuple[Layout, int], *, embeddings: set[torch.Tensor]
    ) -> None:
        self._layout, self._temporaries = layout
        self._embeddings = embeddings
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state where it is missing, and take the kernel's temporaries once."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    parts = self._layout(parameter, parameter in self._embeddings)
                    self.state[parameter] = dict(enumerate(parts))
                if self._temporaries:
                    size = (self._temporaries, *parameter.shape)
                    torch.empty(size, dtype=torch.float32, device=parameter.device)


def _blockwise(parameter: torch.Tensor, *, scale_bytes: int, block: int) -> list[torch.Tensor]:
    count, device = parameter.numel(), parameter.device
    scale = torch.float32 if scale_bytes == 4 else torch.float16
    parts = []
    for _ in range(2):
        parts.append(torch.empty(count, dtype=torch.uint8, device=device))
        parts.append(torch.empty(-(-count // block), dtype=scale, device=device))
    return parts


def _full(parameter: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(parameter), torch.empty_like(parameter)]


def _torchao(parameter: torch.Tensor, _embedding: bool) -> list[torch.Tensor]:
    """`torchao.optim.AdamW8bit`: codes, a scale for every 256, a table of 256 values."""
    if parameter.numel() < 4096 or parameter.numel() % 256:
        return _full(parameter)
    tables = [torch.empty(256, dtype=torch.float32, device=parameter.device) for _ in range(2)]
    return _blockwise(parameter, scale_bytes=4, block=256) + tables


def _bitsandbytes(parameter: torch.Tensor, embedding: bool) -> list[torch.Tensor]:
    """`bitsandbytes` AdamW: the Trainer keeps the state of embeddings in 32 bits."""
    if parameter.numel() < 4096 or embedding:
        return [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
    tables = [torch.empty(256, dtype=torch.float32, device=parameter.device) for _ in range(2)]
    return _blockwise(parameter, scale_bytes=4, block=256) + tables


def _flash(parameter: torch.Tensor, _embedding: bool) -> list[torch.Tensor]:
    """`flashoptim.FlashAdamW`: 8-bit moments, an fp16 scale for every 32, 8 more weight bits."""
    parts = _blockwise(parameter, scale_bytes=2, block=32)
    if parameter.dtype is not torch.float32:
        parts.append(torch.empty_like(parameter, dtype=torch.int8))
    return parts


def _embeddings(model: torch.nn.Module) -> set[torch.Tensor]:
    return {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}


# The state's layout, and how many fp32 copies of a parameter the step makes while it runs.
_LAYOUTS: dict[str, tuple[Layout, int]] = {
    "adamw_torch_8bit": (_torchao, 2),
    "adamw_bnb_8bit": (_bitsandbytes, 0),
    "flash_adamw": (_flash, 0),
}


@dataclass
class Stepper:
    """A model, its optimizer and a tracker: one training step at a time."""

    spec: StepSpec
    config: Any
    model: Any
    tracker: Tracker
    cuda: bool

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.spec, self.model, cuda=self.cuda)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def micro_batch(self) -> None:
        """Forward and backward of one device batch; the gradients stay."""
        spec = self.spec
        batch = make_batch(spec, self.config, spec.rows, spec.length)
        loss = self._loss(batch)
        del batch
        torch.autograd.backward(loss / spec.gradient_accumulation_steps)
        self.tracker.tag(
            (p.grad for p in self.parameters if p.grad is not None), Component.GRADIENTS
        )

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with self._autocast():
            outputs = self.model(**batch)
        # accelerate turns what leaves autocast into fp32, the logits too.
        loss: torch.Tensor = outputs["loss"].float()
        if self.spec.autocast:
            outputs["logits"].float()
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.spec.autocast:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.spec.autocast_dtype))

    def update(self) -> None:
        """Clip, then step the optimizer."""
        with self.tracker.accounting(Component.OPTIMIZER):
            if self.spec.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(
                    self.parameters, self.spec.max_grad_norm, foreach=self.cuda
                )
            self.optimizer.step()
        self.tracker.tag(state_tensors(self.optimizer, host=False), Component.OPTIMIZER)
        if self.cuda:
            self.tracker.forget(state_tensors(self.optimizer, host=True))

    def drop_gradients(self) -> None:
        """`model.zero_grad()`: the gradients are freed, not zeroed."""
        self.model.zero_grad(set_to_none=True)

    def evaluate(self) -> None:
        """One evaluation batch: forward without a graph."""
        spec = self.spec
        rows, length = spec.eval_rows or spec.rows, spec.eval_length or spec.length
        self.model.eval()
        with torch.no_grad():
            self._loss(make_batch(spec, self.config, rows, length))
        self.model.train()


def make_batch(spec: StepSpec, config: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Ids, mask and labels as the Trainer's collator hands them over."""
    text = config.get_text_config()
    pad, end = text.pad_token_id, getattr(text, "eos_token_id", None)
    vocabulary = getattr(text, "vocab_size", None) or 8
    token = next(id_ for id_ in (5, 1, 2, 3) if id_ not in (pad, end))
    ids = torch.full((rows, length), token, dtype=torch.long)
    mask = torch.ones((rows, length), dtype=torch.long)
    if isinstance(end, int) and 0 <= end < vocabulary and end != pad:
        ids[:, -1 - int(spec.has_padding and length > 1)] = end  # BART reads its last token
    if spec.has_padding and length > 1:
        ids[-1, -1], mask[-1, -1] = pad, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if (getattr(text, "type_vocab_size", 0) or 0) > 1:
        batch["token_type_ids"] = torch.zeros((rows, length), dtype=torch.long)
    if spec.problem_type == "single_label_classification":
        batch["labels"] = torch.zeros((rows,), dtype=torch.long)
    elif spec.problem_type == "multi_label_classification":
        batch["labels"] = torch.zeros((rows, spec.num_labels))
    else:
        shape = (rows,) if spec.num_labels == 1 else (rows, spec.num_labels)
        batch["labels"] = torch.zeros(shape)
    return batch
