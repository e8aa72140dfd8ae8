"""Small real models of many families, and one training step on them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from memfit.memory.components import Component
from memfit.memory.tracing.tracker import Tracker
from memfit.strategies import Setup
from memfit.strategies.offload.host_adamw import HostAdamW
from memfit.strategies.offload.host_memory import PlainLink

DEPTH = 4
CLIP = 0.1
"""Below every gradient norm these models have: clipping always does something."""
SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "num_labels": 3,
    "hidden_size": 32,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
DISTILBERT = {"dim": 32, "n_layers": DEPTH, "n_heads": 2, "hidden_dim": 64, "dropout": 0.2}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
SPECIAL = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SHAPE, **DROPOUT}),
    "roberta": ("Roberta", {**SHAPE, **DROPOUT, "pad_token_id": 1}),
    "electra": ("Electra", {**SHAPE, **DROPOUT, "embedding_size": 16}),
    "ernie": ("Ernie", {**SHAPE, **DROPOUT}),
    "albert": ("Albert", {**SHAPE, **DROPOUT, "embedding_size": 16}),
    "distilbert": ("DistilBert", {"vocab_size": 101, "num_labels": 3, **DISTILBERT}),
    "modernbert": ("ModernBert", {**SHAPE, **SPECIAL, "mlp_dropout": 0.2, "local_attention": 8}),
    "mpnet": ("MPNet", {**SHAPE, **DROPOUT, "pad_token_id": 1}),
    "deberta-v2": ("DebertaV2", {**SHAPE, **DROPOUT, **DEBERTA}),
    "qwen3": ("Qwen3", {**SHAPE, "num_key_value_heads": 1, "head_dim": 16}),
}


class LateLink(PlainLink):
    """Copies as late as a device may: when somebody waits. What comes too early reads NaN.

    Device memory is only referred to weakly, as by a stream: whoever lets it go before he
    waited has lost it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out = 0
        self.waits = 0
        self._host: dict[int, Tensor] = {}  # by the number of the storage
        self._queue: list[tuple[Any, Any]] = []
        self._done = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        self.out += 1
        taken = super().take(count, dtype)
        self._host[taken.untyped_storage()._cdata] = taken
        return taken

    def give(self) -> None:
        self.out -= 1

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.is_floating_point():
            target.fill_(torch.nan)
        self._queue.append((self._ref(target), self._ref(source)))

    def _ref(self, tensor: Tensor) -> Any:
        is_hosts = tensor.untyped_storage()._cdata in self._host
        return (lambda: tensor) if is_hosts else weakref.ref(tensor)

    def mark(self) -> int:
        return len(self._queue)

    def wait(self, mark: int) -> None:
        self.waits += 1
        for target, source in self._queue[self._done : mark]:
            assert target() is not None, "memory was let go while a copy into it was queued"
            assert source() is not None, "memory was let go while a copy out of it was queued"
            target().copy_(source())
        self._done = max(self._done, mark)

    finish = wait


def build(name: str, **changes: Any) -> Any:
    """A classifier in training mode, dropout on, the same weights every time."""
    prefix, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
    return getattr(transformers, f"{prefix}ForSequenceClassification")(config).train()


def batch_for(model: Any, rows: int = 3, tokens: int = 16, seed: int = 1) -> dict[str, Tensor]:
    """Texts of which the first is shorter than the others."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, tokens - 5 :] = 0
    ids = torch.randint(5, 101, (rows, tokens), generator=generator)
    return {
        "input_ids": torch.where(mask.bool(), ids, model.config.pad_token_id),
        "attention_mask": mask,
        "labels": torch.arange(rows) % 3,
    }


def setup_for(model: nn.Module, **training: Any) -> Setup:
    """What strategies are applied to."""
    args = transformers.TrainingArguments("unused", use_cpu=True, report_to=[], **training)
    return Setup(model=model, args=args, device=torch.device("cpu"))


def step(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits and all gradients as one vector, with the same random numbers every time."""
    model.zero_grad()
    torch.manual_seed(7)
    output = model(**inputs)
    output.loss.backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return output.logits.detach(), torch.cat(found)


def peak_bytes(model: Any, tracker: Tracker | None = None, rows: int = 8, tokens: int = 32) -> int:
    """What one step needs at most, beside the weights; its inputs count."""
    model.zero_grad()
    inputs = batch_for(model, rows, tokens)
    tracker = tracker or Tracker()
    tracker.adopt(iter(model.parameters()), Component.WEIGHTS)
    weights = tracker.live_bytes
    with tracker:
        model(**inputs).loss.backward()
    return tracker.peak_bytes - weights


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3},
    ]


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: range,
    micro_batches: int = 2,
    schedule: bool = True,
) -> list[float]:
    """A loop with a schedule, clipping, accumulation and dropout; returns the norms."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n * schedule))
    norms = []
    for number in steps:
        torch.manual_seed(number)
        for part in range(micro_batches):
            model(**batch_for(model, seed=10 * number + part)).loss.backward()
        if isinstance(optimizer, HostAdamW):
            assert all(p.grad is None for p in model.parameters())
            norms.append(float(optimizer.measure()))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return norms


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])
