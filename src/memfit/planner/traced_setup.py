"""What a trace runs on: a model without weights, a card that need not be here, the worst rows."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.engine.effective_batch import effective_arguments, leave_out_refused_half
from memfit.engine.half_on_cpu import half_on_cpu
from memfit.engine.micro_batches import MicroBatching, group_rows
from memfit.memory.cards import DeviceProfile
from memfit.memory.stock_step import OPTIMIZERS, StepSpec
from memfit.memory.tracing.meta_models import adapted, build_on_meta, model_config
from memfit.memory.tracing.traced_device import TracedDevice
from memfit.planner.task import Task
from memfit.strategies import (
    Freezing,
    HalfPrecision,
    Lora,
    Packing,
    Setup,
    Strategy,
    Truncation,
    find,
    ordered,
)

Batch = dict[str, Any]

_SAMPLED = 16

_MOST_BATCHES = 400
"""Drawn to see which sizes come again; more make no difference."""


@dataclass(frozen=True, slots=True)
class TracedRows:
    """One micro-batch: the length of each row, and how many such parts a step has."""

    lengths: tuple[int, ...]
    parts: int

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(self.lengths)


def cut_lengths(task: Task, strategies: Sequence[Strategy]) -> list[int]:
    """Tokens of every row as these strategies leave them, longest first."""
    cut = find(strategies, Truncation)
    most = task.longest_tokens if cut is None else cut.max_length
    return sorted((min(length, most) for length in task.lengths), reverse=True)


def rows_for(
    task: Task,
    strategies: Sequence[Strategy],
    limits: MicroBatching,
    *,
    repads: bool = False,
    tokens: int | None = None,
    whole: bool = False,
) -> TracedRows:
    """The largest micro-batch there can be, or one of so many tokens (padding counted).

    `whole` is a batch of its own, not a part of one. With `repads` packed texts are padded again
    for the attention alone, so that many short texts beside a longer one may need more than a few
    long ones.
    """
    lengths = cut_lengths(task, strategies)
    packed = find(strategies, Packing) is not None
    rows = min(task.rank_rows, len(lengths))
    worst = lengths[:rows]
    most_rows = min(rows, limits.max_rows or rows)
    every = sum(worst) if packed else rows * worst[0]
    asked = tokens
    if tokens is None:
        tokens = sum(worst[:most_rows]) if packed else most_rows * worst[0]
        if limits.max_tokens is not None:
            tokens = max(min(tokens, limits.max_tokens), worst[0])
        if packed and tokens == every:
            return TracedRows(tuple(worst), 1)
    parts = 1 if whole else _parts(limits, every, rows, most_rows)
    widest: tuple[int, ...] = ()
    if packed and repads and (whole or asked is None):
        widest = _widest_group(lengths, rows, limits, cut=parts > 1)
    if packed and parts == 1:
        if widest:
            return TracedRows(_fitted(list(widest), tokens, worst[0]), 1)
        return TracedRows(_spread(lengths, rows, tokens), 1)
    if widest:
        return TracedRows(widest, parts)
    # A part of a step that is split has rows of like length, the first one the longest.
    count = min(most_rows, rows if parts == 1 else max(tokens // worst[0], 1))
    return TracedRows(_shared(tokens, count, worst[0]), parts)


def _parts(limits: MicroBatching, whole: int, rows: int, most_rows: int) -> int:
    """How many micro-batches the largest effective batch falls into."""
    by_rows = -(-rows // most_rows)
    by_tokens = 1 if limits.max_tokens is None else min(-(-whole // limits.max_tokens), rows)
    return max(by_rows, by_tokens)


def _widest_group(
    lengths: Sequence[int], rows: int, limits: MicroBatching, *, cut: bool
) -> tuple[int, ...]:
    """The largest part of batches that are cut, or the largest batch that is not, padding counted.

    Empty where no batch that was drawn is of that kind.
    """
    draw = random.Random(0)
    batches = [lengths[:rows]] + [
        draw.sample(lengths, rows) for _ in range(_SAMPLED * (len(lengths) > rows))
    ]
    groups = [
        tuple(batch[row] for row in group)
        for batch in batches
        if (len(parts := group_rows(batch, limits, packed=True)) > 1) == cut
        for group in parts
    ]
    # A layer keeps about twice as much of each token as its attention does of each cell.
    return max(groups, key=lambda group: 2 * sum(group) + len(group) * max(group), default=())


def _spread(lengths: Sequence[int], rows: int, tokens: int) -> tuple[int, ...]:
    """So many rows spread over the lengths there are, shrunk or grown to this sum."""
    step = len(lengths) / rows
    chosen = [lengths[int((row + 0.5) * step)] for row in range(rows)]
    return _fitted(chosen, tokens, lengths[0])


def _shared(tokens: int, rows: int, longest: int) -> tuple[int, ...]:
    return _fitted([tokens // rows or 1] * rows, tokens, longest)


def _fitted(chosen: list[int], tokens: int, longest: int) -> tuple[int, ...]:
    """Scaled to the sum as far as the longest row allows, at least a token each."""
    factor = tokens / sum(chosen)
    scaled = [max(1, min(round(length * factor), longest)) for length in chosen]
    missing = tokens - sum(scaled)
    for row, length in enumerate(scaled):
        change = max(1 - length, min(missing, longest - length))
        scaled[row] += change
        missing -= change
    return tuple(sorted(scaled, reverse=True))


def graph_count(
    task: Task, strategies: Sequence[Strategy], limits: MicroBatching, bucket_tokens: int
) -> int:
    """How many token buckets an epoch captures: the largest, and those that come twice.

    Parts of batches that are cut have graphs of their own, which are not counted: the bytes of a
    kernel (memory/cuda_context.py) are enough for both, as measured.
    """
    lengths = cut_lengths(task, strategies)
    rows = min(task.rank_rows, len(lengths))
    limit = limits.max_tokens
    draw = random.Random(0)
    seen: Counter[int] = Counter()
    for _ in range(min(task.steps_per_epoch, _MOST_BATCHES)):
        tokens = sum(draw.sample(lengths, rows))
        seen[-(-min(tokens, limit or tokens) // bucket_tokens)] += 1
    largest = -(-min(sum(lengths[:rows]), limit or sum(lengths[:rows])) // bucket_tokens)
    return len({bucket for bucket, times in seen.items() if times > 1} | {largest})


def rows_at_once(most_tokens: int, longest: int, rows: int) -> int:
    """How many of the longest rows are within so many tokens: at least one, at most all."""
    return min(max(most_tokens // longest, 1), rows)


def make_batch(task: Task, config: Any, lengths: Sequence[int]) -> Batch:
    """A batch as a collator hands it over, padded on the right: real tensors."""
    if task.given is not None:
        return task.given.make_batch(lengths)
    text = config.get_text_config()
    pad, end = text.pad_token_id or 0, getattr(text, "eos_token_id", None)
    token = next(id_ for id_ in (5, 1, 2, 3) if id_ not in (pad, end))
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, token, pad)
    if isinstance(end, int) and 0 <= end < (text.vocab_size or 0) and end != pad:
        ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = end
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if (getattr(text, "type_vocab_size", 0) or 0) > 1:
        batch["token_type_ids"] = torch.zeros_like(ids)
    batch["labels"] = labels_for(task, len(lengths))
    return batch


def labels_for(task: Task, rows: int) -> torch.Tensor:
    """Labels of the kind the task has."""
    if task.problem_type == "single_label_classification":
        return torch.zeros(rows, dtype=torch.long)
    single = task.problem_type == "regression" and task.num_labels == 1
    return torch.zeros((rows,) if single else (rows, task.num_labels))


class LengthRows:
    """A dataset of which only the lengths are known: rows of special tokens around a text."""

    column_names = ("length", "input_ids")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, key: Any) -> Any:
        if key == "length":
            return self._lengths
        length = self._lengths[key]
        return {"input_ids": [2, *[5] * max(length - 2, 0), 3][:length]}


# Optimizers the trace does not run itself, by one whose state is as large or larger.
_LIKE = {"adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "adamw_bnb_8bit"}

_LARGEST = "adamw_torch"

_PURE = {"bfloat16": "pure_bf16", "float16": "pure_fp16"}


def device_to_trace(card: DeviceProfile | None) -> TracedDevice:
    """What the code under trace may ask."""
    if card is None:
        return TracedDevice(cuda=False)
    return TracedDevice(cuda=True, capability=card.capability, triton=card.has_triton)


def spec_of(task: Task) -> StepSpec:
    """What the builders of models must know of the task."""
    return StepSpec(
        config=task.config,
        rows=1,
        length=1,
        num_labels=task.num_labels,
        problem_type=task.problem_type,
        precision=_precision(task),
        attn_implementation=getattr(task.config, "_attn_implementation", None),
        gradient_checkpointing=bool(task.args.gradient_checkpointing),
        freeze=task.freeze,
        lora=task.lora,
    )


def _precision(task: Task) -> str:
    if task.dtype in _PURE:
        return _PURE[task.dtype]
    return "bf16" if task.args.bf16 else "fp16" if task.args.fp16 else "fp32"


def full_config(task: Task) -> Any:
    """The configuration with the head the task asks for; models share it, so it is a copy."""
    if task.given is not None:
        return copy.deepcopy(task.config)
    return model_config(spec_of(task))


def build_model(task: Task, config: Any, layers: int | None = None) -> Any:
    """The classifier on the meta device; `layers` of its configuration were kept."""
    spec = spec_of(task)
    if task.given is not None:
        depth = int(config.get_text_config().num_hidden_layers)
        return adapted(task.given.build(depth), spec)
    if layers is not None and spec.freeze is not None and spec.freeze.isdecimal():
        spec = spec.replace(freeze=str(min(layers, int(spec.freeze))))
    return build_on_meta(spec, config)


def make_setup(task: Task, model: Any) -> Setup:
    """What strategies are applied to: the Trainer's, but for the device, which is traced."""
    with warnings.catch_warnings():
        # Of this machine, or said when the training begins.
        warnings.simplefilter("ignore")
        args = effective_arguments(task.args)
        if task.card is None:
            leave_out_refused_half(args)
    return Setup(
        model=model,
        args=args,
        device=torch.device("cpu"),
        ranks=task.ranks,
        card=task.card,
        stock_loss=task.stock_loss and args.label_smoothing_factor == 0,
        train_dataset=LengthRows(task.lengths),
        user_set=task.user_set,
    )


def apply_on_meta(strategies: Sequence[Strategy], setup: Setup) -> list[Strategy]:
    """Apply what must come before there are weights; the rest, in order, is returned.

    peft can choose what learns only before a model has (fake) weights.
    """
    rest = []
    for strategy in ordered(strategies):
        if isinstance(strategy, Freezing | Lora):
            apply_one(strategy, setup)
        else:
            rest.append(strategy)
    return rest


def apply_one(strategy: Strategy, setup: Setup) -> None:
    """Apply one strategy, or say in a sentence why it has no use."""
    with warnings.catch_warnings():
        # What it tells the user it tells when the training begins.
        warnings.simplefilter("ignore")
        strategy.apply(setup)


def optimizer_spec(task: Task, setup: Setup) -> StepSpec:
    """The stock optimizer of these arguments, or one whose state is as large."""
    optim = str(getattr(setup.args.optim, "value", setup.args.optim))
    optim = _LIKE.get(optim, optim)
    known = optim if optim in OPTIMIZERS else _LARGEST
    return dataclasses.replace(spec_of(task), optim=known)


def autocast_dtype(task: Task, strategies: Sequence[Strategy], *, cuda: bool) -> torch.dtype | None:
    """What the forward pass computes in, where it is not the weights' own type."""
    chosen = find(strategies, HalfPrecision)
    half = None if chosen is None else chosen.dtype
    if not cuda and not half_on_cpu().bfloat16:
        return None
    if task.args.bf16 or half == "bfloat16":
        return torch.bfloat16
    # A CPU trains in fp32 whatever fp16 says.
    if cuda and (task.args.fp16 or half == "float16"):
        return torch.float16
    return None
