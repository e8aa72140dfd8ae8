"""What a plan is made for: a model without weights, its rows, a device and a budget.

Memory is planned for the worst batch the shuffle can draw, time for an average one. Both come
from the data's own lengths. `budget_bytes` is where a budget becomes bytes.

transformers' own sequence classifiers are built from their configuration. Any other model, with
another head, another task or modules of the user's own, is copied with shapes only; for a shallow
trace its list of layers is cut. Its batches have the shapes of one that its collator made.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from memfit.config import RunConfig
from memfit.data import LabelSpace
from memfit.engine.effective_batch import effective_rows
from memfit.engine.half_on_cpu import half_on_cpu
from memfit.engine.micro_batches import MicroBatching, group_rows, longest_row, row_lengths
from memfit.engine.step_state import preserved_rng
from memfit.errors import TraceError
from memfit.memory.available import MemoryReading, reader_of
from memfit.memory.cards import DeviceProfile
from memfit.memory.device import is_cuda, kind_of
from memfit.memory.tracing.depth import cut_layers
from memfit.models.layer_stack import sees_padding
from memfit.models.layers import base_of, layers_of
from memfit.strategies import Strategy, Truncation, find
from memfit.units import Budget

_SAMPLED_BATCHES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is trained, on which device, inside which budget: nothing in it may a plan change."""

    config: PretrainedConfig
    """The model's configuration; no weights are needed to plan."""
    lengths: tuple[int, ...]
    """Tokens of every training row, cut at the longest allowed."""
    args: TrainingArguments
    """As the user gave them; per-device batch x accumulation is one rank's effective batch."""
    ranks: int = 1
    """Processes that train together, each with a card of its own and an even share of the rows."""
    user_set: frozenset[str] = frozenset()
    """The training arguments given by name: constraints, not suggestions."""
    num_labels: int = 2
    problem_type: str = "single_label_classification"
    freeze: str | None = None
    """What the user froze: encoder, embeddings, or a number of layers."""
    lora: int | None = None
    """The rank of the user's own adapters."""
    dtype: str = "float32"
    """The weights' own type, as they are loaded."""
    stock_loss: bool = True
    weighted_loss: bool = False
    eval_rows: int = 0
    """Rows of one evaluation."""
    skips_bad_steps: bool = False
    """Whether a step whose gradient is not finite must leave the weights as they are."""
    given: GivenModel | None = None
    """The model itself, where its configuration alone does not say what it is."""
    card: DeviceProfile | None = None
    """None is this machine's CPU, whose budget counts the bytes of live tensors."""
    budget: Budget = field(default_factory=Budget)
    """As the user wrote it."""
    budget_bytes: int = 0
    """What the process may hold on the device; `reserve_bytes` are taken off already."""
    exact: bool = False
    allow: frozenset[str] = frozenset()
    """Permissions given with --allow."""
    reserve_bytes: int = 0
    """Left free, because earlier plans needed more than was predicted."""

    def placed(
        self,
        budget: Budget,
        where: torch.device | DeviceProfile,
        *,
        exact: bool = False,
        allow: frozenset[str] = frozenset(),
    ) -> Task:
        """Returns the task on a device of this machine, or on a card by its profile."""
        return dataclasses.replace(
            self,
            card=where if isinstance(where, DeviceProfile) else card_here(where),
            budget=budget,
            budget_bytes=budget_bytes(where, budget),
            exact=exact,
            allow=allow,
        )

    def leaving(self, free_bytes: int) -> Task:
        """Returns the same task with so many bytes less to plan with."""
        return dataclasses.replace(
            self,
            budget_bytes=max(self.budget_bytes - free_bytes, 0),
            reserve_bytes=self.reserve_bytes + free_bytes,
        )

    @cached_property
    def depth(self) -> int:
        """Layers a text passes."""
        text: Any = self.config.get_text_config()
        return int(text.num_hidden_layers) * int(getattr(text, "inner_group_num", 1))

    @cached_property
    def device_kind(self) -> str:
        """The kind of the device, see memory/device.py."""
        return "cuda" if self.card is not None else kind_of(self.args.device)

    @cached_property
    def half(self) -> Literal["bfloat16", "float16"]:
        """The half precision this device computes in."""
        return "bfloat16" if self.card is None or self.card.has_bf16 else "float16"

    @cached_property
    def refuses_half(self) -> bool:
        """Whether the user said no to that precision."""
        name = "bf16" if self.half == "bfloat16" else "fp16"
        return name in self.user_set and not getattr(self.args, name)

    @cached_property
    def effective_rows(self) -> int:
        """Rows one optimizer step learns from, on all ranks."""
        return self.rank_rows * self.ranks

    @cached_property
    def rank_rows(self) -> int:
        """Rows of them on one rank, at most."""
        return int(self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps)

    @cached_property
    def longest_tokens(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @cached_property
    def worst_tokens(self) -> int:
        """Tokens of the largest effective batch the shuffle can draw."""
        return sum(sorted(self.lengths, reverse=True)[: self.effective_rows])

    @cached_property
    def mean_tokens(self) -> float:
        """Tokens of an effective batch on average."""
        return sum(self.lengths) / len(self.lengths) * self.effective_rows

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the rows."""
        return -(-len(self.lengths) // self.effective_rows)

    @cached_property
    def _batches(self) -> dict[int, Batches]:
        return {}

    def batches(self, strategies: Sequence[Strategy] = ()) -> Batches:
        """What one rank gets of effective batches, of the rows as these strategies leave them.

        Ranks share a batch by tokens, so that a rank's share is like a batch of as many rows.
        The largest batch is made of the longest rows.
        """
        cut = find(strategies, Truncation)
        longest = self.longest_tokens if cut is None else cut.max_length
        if longest not in self._batches:
            lengths = [min(length, longest) for length in self.lengths]
            self._batches[longest] = Batches(lengths, self.rank_rows)
        return self._batches[longest]


def budget_bytes(where: torch.device | DeviceProfile, budget: Budget) -> int:
    """The budget in bytes; `auto` leaves room for a display, unless it was taken off already."""
    reading = memory_of(where)
    limit_bytes = reading.limit_bytes(budget)
    if isinstance(where, DeviceProfile) and budget == Budget():
        limit_bytes += min(where.reserved_bytes, reading.free_bytes - limit_bytes)
    return limit_bytes


def memory_of(where: torch.device | DeviceProfile) -> MemoryReading:
    """What there is now, and what this process holds; a card elsewhere holds what was said."""
    if isinstance(where, DeviceProfile):
        return MemoryReading(where.total_bytes, where.usable_bytes, 0)
    return reader_of(where, lambda: 0)()


def card_here(device: torch.device) -> DeviceProfile | None:
    """The card with its speeds as measured; None is the CPU, and devices planned for like one."""
    if not is_cuda(device):
        half_on_cpu()  # before anything is computed
        return None
    from memfit.planner.step_time import calibrate

    with preserved_rng():
        return calibrate(device)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How effective batches are cut under one limit."""

    micro_batches: float
    """Parts of an average effective batch."""
    tokens: float
    """Tokens of an average effective batch on the device, padding included."""
    worst_tokens: int
    """The most tokens that are on the device at once."""
    worst_part_tokens: int
    """The same of a batch that is cut: packed parts are even, and so not as large as may be."""
    worst_micro_batches: int
    """Parts of the largest effective batch."""
    pairs: float
    """Pairs of a token and one it attends to, in an average effective batch."""


class Batches:
    """Effective batches drawn from the rows of a dataset, always the same ones."""

    def __init__(self, lengths: Sequence[int], effective_rows: int) -> None:
        self._lengths = tuple(lengths)
        self._rows = min(effective_rows, len(self._lengths))
        draw = random.Random(0)
        self._sampled = [
            draw.sample(self._lengths, self._rows)
            if len(self._lengths) > self._rows
            else list(self._lengths)
            for _ in range(_SAMPLED_BATCHES if len(self._lengths) > self._rows else 1)
        ]
        self._worst = sorted(self._lengths, reverse=True)[: self._rows]
        self._cut = cache(self._measure)
        self._evaluated = cache(self._most_evaluated)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest row."""
        return self._worst[0]

    @property
    def worst_tokens(self) -> int:
        """Tokens of the largest effective batch, without padding."""
        return sum(self._worst)

    def usual_most_tokens(self) -> int:
        """More than most batches have: the largest of those sampled, and a little."""
        return min(round(1.02 * max(map(sum, self._sampled))), self.worst_tokens)

    def padding_share(self) -> float:
        """The share of a padded batch that is padding."""
        padded = sum(len(rows) * max(rows) for rows in self._sampled)
        return 1 - sum(map(sum, self._sampled)) / padded

    def cut(self, limits: MicroBatching, *, packed: bool) -> Cutting:
        """What these limits make of the batches."""
        return self._cut(limits, packed)

    def _measure(self, limits: MicroBatching, packed: bool) -> Cutting:
        parts = [self._parts(rows, limits, packed) for rows in self._sampled]
        worst = self._parts(self._worst, limits, packed)
        most = self._most(limits, packed)
        even = (self.worst_tokens + self.longest_tokens) // 2
        cut_evenly = packed and len(worst) > 1 and limits.max_rows is None
        return Cutting(
            micro_batches=sum(map(len, parts)) / len(parts),
            tokens=sum(map(sum, parts)) / len(parts),
            worst_tokens=most,
            worst_part_tokens=min(most, even) if cut_evenly else most,
            worst_micro_batches=len(worst),
            pairs=sum(self._pairs(rows, limits, packed) for rows in self._sampled) / len(parts),
        )

    def cut_whole(self, packed: bool) -> int:
        """Tokens of the largest effective batch at once, padding included."""
        return self.cut(MicroBatching(), packed=packed).worst_tokens

    def evaluated_tokens(self, rows: int, limits: MicroBatching, *, packed: bool) -> int:
        """Tokens of the largest part of an evaluation batch of this many rows."""
        return self._evaluated(rows, limits, packed)

    def _most_evaluated(self, rows: int, limits: MicroBatching, packed: bool) -> int:
        ordered = sorted(self._lengths, reverse=True)
        longest = ordered[0]
        rows = min(rows, limits.max_rows or rows)
        repeated, rest = divmod(rows, len(ordered))
        most = repeated * sum(ordered) + sum(ordered[:rest]) if packed else rows * longest
        return most if limits.max_tokens is None else max(min(most, limits.max_tokens), longest)

    def _pairs(self, rows: Sequence[int], limits: MicroBatching, packed: bool) -> int:
        if packed:
            return sum(length**2 for length in rows)
        groups = group_rows(rows, limits, packed=False)
        return sum(len(group) * max(rows[index] for index in group) ** 2 for group in groups)

    def _most(self, limits: MicroBatching, packed: bool) -> int:
        """No batch brings more: all rows at the longest, up to the limits."""
        rows = min(self._rows, limits.max_rows or self._rows)
        longest = self._worst[0]
        most = sum(self._worst[:rows]) if packed else rows * longest
        if limits.max_tokens is None:
            return most
        return max(min(most, limits.max_tokens), longest)

    @staticmethod
    def _parts(rows: Sequence[int], limits: MicroBatching, packed: bool) -> list[int]:
        """Tokens of each micro-batch of one effective batch."""
        groups = group_rows(rows, limits, packed=packed)
        if packed:
            return [sum(rows[index] for index in group) for group in groups]
        return [len(group) * max(rows[index] for index in group) for group in groups]


Collate = Callable[[list[Any]], Any]

_TOKENS = ("input_ids", "inputs_embeds", "attention_mask")


@dataclass(frozen=True, eq=False)
class GivenModel:
    """An architecture and the shapes of its batches."""

    model: nn.Module
    """On the meta device, of full depth."""
    batch: Mapping[str, Any]
    """A batch as the collator makes it."""
    rows: int
    width: int
    texts: int
    """In one row: several where one is to be chosen."""

    def build(self, layers: int) -> Any:
        """The model with its first layers only; all its weights learn."""
        model = copy.deepcopy(self.model)
        stack = layers_of(model)  # type: ignore[arg-type]
        if layers < len(stack):
            _cut(model, len(stack), layers)
        return model.requires_grad_(True).train()

    def make_batch(self, lengths: Sequence[int]) -> dict[str, Any]:
        """A batch of rows of these lengths, as wide as the longest: real tensors."""
        width = max(max(lengths) // self.texts, 1)
        made = {name: self._sized(value, len(lengths), width) for name, value in self.batch.items()}
        mask = made.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            inside = torch.arange(width) < torch.tensor(lengths)[:, None]
            made["attention_mask"] = inside.to(mask.dtype)
        return made

    def _sized(self, value: Any, rows: int, width: int) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or len(value) != self.rows:
            return value
        inner = [width if size == self.width else size for size in value.shape[1:]]
        return torch.ones((rows, *inner), dtype=value.dtype).clamp(max=_largest(value))


def is_built_from_config(model: Any) -> bool:
    """Whether transformers makes the same model of its configuration alone."""
    if not isinstance(model, PreTrainedModel) or sees_padding(model):
        return False
    built: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    return built is type(model)


def given_model(model: Any, dataset: Any, collate: Collate | None) -> tuple[GivenModel, list[int]]:
    """The model's architecture, and the tokens of every row as its batches are padded."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TraceError("{name} is no transformers model", name=name)
    if collate is None or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TraceError("the batches of {name} cannot be looked at beforehand", name=name)
    if not len(dataset):
        raise TraceError("there are no rows to train on")
    lengths = _lengths(dataset)
    order = sorted(range(len(dataset)), key=lambda row: lengths[row] if lengths else 0)
    narrow = collate([dataset[row] for row in order[:2]])
    batch = collate([dataset[row] for row in order[-2:]])
    rows = min(2, len(order))
    if not isinstance(batch, Mapping):
        raise TraceError("its batches have no names")
    shape = _shape(batch, name)
    width, texts = shape[-1], math.prod(shape[:-1])
    if not lengths or texts > 1 or _shape(narrow, name)[-1] >= width:
        lengths = [width * texts] * len(dataset)  # however short the rows are
    given = GivenModel(on_meta(model), dict(batch), rows, width, texts)
    return given, lengths


def on_meta(model: nn.Module) -> nn.Module:
    """A copy with shapes only: no memory is taken."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_weight else bare
    return copy.deepcopy(model, memo)


def _cut(model: Any, count: int, layers: int) -> None:
    """Take the upper layers out of the stack, and their number out of every configuration."""
    for parent in base_of(model).modules():
        for name, child in parent._modules.items():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                parent._modules[name] = nn.ModuleList(list(child)[:layers])
    found = (getattr(part, "config", None) for part in model.modules())
    for config in {id(one): one for one in found if one is not None}.values():
        cut_layers(config, layers)


def _lengths(dataset: Any) -> list[int]:
    try:
        lengths = row_lengths(dataset)
    except (KeyError, TypeError):  # rows of something else than tokens
        return []
    return lengths if len(lengths) == len(dataset) else []


def _shape(batch: Any, name: str) -> tuple[int, ...]:
    """Of a row's tokens: how many texts, and how long they are padded."""
    for key in _TOKENS:
        value = batch.get(key) if isinstance(batch, Mapping) else None
        if isinstance(value, Tensor) and value.dim() > 1:
            return tuple(value.shape[1:-1] if key == "inputs_embeds" else value.shape[1:])
    raise TraceError("the batches of {name} have no tokens", name=name)


def _largest(value: Tensor) -> Any:
    """What every number of a made-up batch may be: no token or class that does not exist."""
    return value.max().item() if value.numel() else 1


_HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def task_of_run(
    config: RunConfig,
    settings: PretrainedConfig,
    args: TrainingArguments,
    labels: LabelSpace,
    lengths: Sequence[int],
    *,
    eval_rows: int = 0,
    ranks: int | None = None,
) -> Task:
    """A run of the command line: no weights are needed, only the model's settings.

    `ranks` will train it; as many as there are now if None.
    """
    model = config.model
    settings = copy.deepcopy(settings)
    if model.attn_implementation is not None:
        settings._attn_implementation = model.attn_implementation
    return Task(
        config=settings,
        lengths=tuple(lengths),
        args=args,
        ranks=args.world_size if ranks is None else ranks,
        user_set=user_set_of(config),
        num_labels=labels.num_labels,
        problem_type=labels.problem_type,
        freeze=model.freeze,
        lora=model.lora,
        dtype=model.dtype or "float32",
        stock_loss=args.label_smoothing_factor == 0 and config.class_weights is None,
        weighted_loss=config.class_weights is not None,
        eval_rows=eval_rows,
        skips_bad_steps=config.on_nan == "skip",
    )


def task_of_model(
    model: Any,
    args: TrainingArguments,
    train_dataset: Any,
    *,
    user_set: frozenset[str] | None = None,
    own_optimizer: str = "",
    stock_loss: bool = True,
    weighted_loss: bool = False,
    eval_rows: int = 0,
    skips_bad_steps: bool = False,
    collate: Collate | None = None,
) -> Task:
    """A Trainer's model and arguments, before anything was done to them.

    Rows that cannot be looked at (a stream) are taken to be as long as the model can read.
    `own_optimizer` names one that was made outside: it stays, and is priced like AdamW. `collate`
    makes a batch of rows, for models that are more than their configuration says.
    """
    inner, rank = _without_adapters(model)
    given = None
    if not is_built_from_config(inner):
        if rank is not None:
            raise TraceError("adapters in {name} cannot be traced", name=type(inner).__name__)
        given, lengths = given_model(inner, train_dataset, collate)
    else:
        lengths = row_lengths(train_dataset)
    settings: Any = inner.config
    if not lengths:
        lengths = [longest_row(train_dataset, inner)] * effective_rows(args)
    known = changed_fields(args) if user_set is None else user_set
    if own_optimizer:
        args, known = copy.copy(args), known | {"optim"}
        args.optim = own_optimizer
    return Task(
        config=copy.deepcopy(settings),
        lengths=tuple(lengths),
        args=args,
        ranks=args.world_size,
        user_set=known,
        num_labels=int(settings.num_labels or 2),
        problem_type=settings.problem_type or "single_label_classification",
        freeze=None if rank else _frozen(inner),
        lora=rank,
        dtype=_HALF.get(inner.dtype, "float32"),
        stock_loss=stock_loss,
        weighted_loss=weighted_loss,
        eval_rows=eval_rows,
        skips_bad_steps=skips_bad_steps,
        given=given,
    )


def user_set_of(config: RunConfig) -> frozenset[str]:
    """What was given by name: by flag, in the TOML file or in the call."""
    attention = {"attn_implementation"} if config.model.attn_implementation is not None else set()
    return frozenset(config.training) | attention


def changed_fields(args: TrainingArguments) -> frozenset[str]:
    """The arguments that are not the default: all that can be known of what the user set."""
    return frozenset(
        field.name
        for field in dataclasses.fields(args)
        if field.default is not dataclasses.MISSING
        and _plain(getattr(args, field.name, field.default)) != _plain(field.default)
    )


def _plain(value: Any) -> Any:
    """Enumerations as their text."""
    return getattr(value, "value", value)


def _without_adapters(model: Any) -> tuple[Any, int | None]:
    """The transformers model itself, and the rank of the LoRA adapters around it."""
    if not hasattr(model, "peft_config"):
        return model, None
    ranks = [getattr(config, "r", 8) for config in model.peft_config.values()]
    return model.get_base_model(), max(ranks)


def _frozen(model: Any) -> str | None:
    """The whole encoder, the embeddings and N layers, or nothing.

    Weights frozen in no order are priced as if they learned.
    """

    def learns(part: torch.nn.Module) -> bool:
        return any(parameter.requires_grad for parameter in part.parameters())

    if not learns(base_of(model)):
        return "encoder"
    layers = layers_of(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    first = next((count for count, layer in enumerate(layers) if learns(layer)), len(layers))
    before = list(base_of(model).named_parameters())
    embeddings = [p for name, p in before if id(p) not in inside and "embed" in name]
    if not embeddings or any(parameter.requires_grad for parameter in embeddings):
        return None
    return str(first) if first else "embeddings"
