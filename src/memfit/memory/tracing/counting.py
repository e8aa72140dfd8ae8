"""Counts what a step does while it runs: arithmetic, traffic and launches.

with Counting() as counter:      # from here on `current()` is this counter
        ...                          # whoever sees operators calls counter.see(...)
    counter.counts()

The memory trace sees every operator already, so it calls `see`; where nobody does, `mode()` is a
dispatch mode that does nothing else. Triton kernels are no operators: what stands in for them
in a trace says by `kernel` what they would have done. Nobody counts: `current()` is None.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memfit.memory.tracing.tracker import tensors_in


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """One optimizer step on the device; sums and multiples are counts again."""

    half_flops: float = 0.0
    """Multiplications and additions of matrix products in bf16 or fp16."""
    full_flops: float = 0.0
    """The same in fp32."""
    tf32_flops: float = 0.0
    """The same of fp32 products that may be rounded to TF32."""
    half_attention_flops: float = 0.0
    """Inside attention kernels, which reach a part of a product's rate."""
    full_attention_flops: float = 0.0
    bytes_moved: float = 0.0
    """Read from and written to the device's memory by kernels that are not matrix products."""
    product_bytes: float = 0.0
    """The same by matrix products, which overlap it with arithmetic."""
    launches: float = 0
    """Kernels started from the host; replayed ones are in `replayed`."""
    scripted: float = 0
    """Those of the launches that Python itself makes, not torch: Triton's kernels."""
    products: float = 0
    """Those of the launches that are matrix products."""
    recomputations: float = 0
    """How often backward stops to compute a layer, or a part of one, a second time."""
    replayed: float = 0
    """Kernels a captured graph starts."""
    replays: float = 0
    """How often a graph is started."""
    graph_launches: float = 0
    """How many more a graph has than are launched here: what goes through a table of pointers in
    one launch is captured one by one."""
    to_host_bytes: float = 0.0
    to_device_bytes: float = 0.0
    """Copies across the bus, overlapped with compute where the strategy does so."""
    reached_bytes: float = 0.0
    """Host memory that kernels read and write in place; nothing runs beside them."""
    host_parameters: float = 0
    """Parameters the CPU updates."""

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(**{name: value + getattr(other, name) for name, value in _items(self)})

    def __sub__(self, other: StepCounts) -> StepCounts:
        return self + other * -1

    def __mul__(self, factor: float) -> StepCounts:
        return StepCounts(**{name: value * factor for name, value in _items(self)})

    def as_graphs(self) -> StepCounts:
        """The same step replayed: the host starts one graph instead of every kernel."""
        return dataclasses.replace(
            self,
            launches=0,
            scripted=0,
            products=0,
            recomputations=0,
            graph_launches=0,
            replayed=self.replayed + self.launches + self.graph_launches,
        )


def _items(counts: StepCounts) -> list[tuple[str, float]]:
    return [(f.name, getattr(counts, f.name)) for f in dataclasses.fields(counts)]


_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_BACKWARD_NODE: Callable[[], Any] = torch._C._current_autograd_node

# Operators that start no kernel though they are no views by their schema.
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "set_", "resize_", "is_same_size", "record_stream", "is_pinned", "_reshape_alias",
    "lift_fresh", "sym_size", "sym_numel", "sym_stride", "device",
}  # fmt: skip

# What their first argument held is not read: it is written over, or only its shape is asked for.
_UNREAD_FIRST = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full",
}  # fmt: skip

# What makes a new tensor of one in host memory, unless it is said to be there too, moves it.
_MOVES = {"clone", "_to_copy"}

# Of a table they read only the rows that are asked for.
_GATHERS = {"embedding", "index_select", "index", "gather"}

# Kernels of one operator, where there are several.
_KERNELS = {
    "native_layer_norm_backward": 2,
    "_flash_attention_backward": 3,
    "_efficient_attention_backward": 3,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 3,
    "_scaled_dot_product_cudnn_attention_backward": 3,
}

_SORTING_KERNELS = 12
"""An embedding's backward sorts its indices, unless they are few."""

_SORTED_FROM = 3072

_ADAM_TENSORS = 4
"""Its weight, gradient and two moments."""

# One launch over a list of tensors takes 320 blocks of 65,536 elements (multi_tensor_apply).
_LIST_ELEMENTS = 320 * 65_536

# Where an attention over packed texts has its offsets and the longest text, and how many
# products of query by key it computes: two forward, five backward.
_PACKED_ATTENTION = {
    "_flash_attention_forward": (0, 3, 5, 2),
    "_efficient_attention_forward": (0, 4, 6, 2),
    "_flash_attention_backward": (1, 6, 8, 5),
    "_efficient_attention_backward": (1, 6, 8, 5),
}

_current: Counting | None = None


def current() -> Counting | None:
    """The counter that is active; None where nobody counts."""
    return _current


def count_kernel(
    *tensors: torch.Tensor | None, launches: int = 1, captured: int | None = None
) -> None:
    """A kernel that reads or writes each of these once; nothing where nobody counts.

    `captured` is how many a graph has in its place, where that is another number.
    """
    if _current is not None:
        nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        _current.kernel(bytes_moved=nbytes, launches=launches, captured=captured)


def count_reached(*tensors: torch.Tensor) -> None:
    """Host memory that a kernel reads or writes in place, each of these once."""
    if _current is not None:
        _current.add(StepCounts(reached_bytes=sum(tensor.nbytes for tensor in tensors)))


def count_product(rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    """[rows, inner] by [inner, columns], where a trace leaves the product itself out."""
    if _current is not None:
        _current.product(rows, inner, columns, dtype)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of an operator by its schema."""

    name: str
    free: bool
    mutated: tuple[int, ...]
    """Places of the arguments it writes to."""
    flops: Callable[..., int] | None
    """torch's formula; None where it has none."""
    attention: tuple[int, int, int] | None
    """Places of query, key and value."""
    known: bool = True
    """Whether there is a schema to know all this by."""


_LEFT_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1}
"""Products, most of a step's operators that compute, and which argument is the left factor."""


class Counting:
    """Adds up a step's arithmetic, traffic and launches.

    `attended_tokens` is what a token of a packed batch attends to on average (the sum of squared
    lengths over the sum of lengths), for traces in which the texts' lengths have no values.
    With `tf32` fp32 products may be rounded as the card likes. `guessed` names the operators whose
    arithmetic could not be counted.
    """

    def __init__(self, *, attended_tokens: float | None = None, tf32: bool = False) -> None:
        self._attended_tokens = attended_tokens
        self._tf32 = tf32
        self._sums = dict.fromkeys(StepCounts.__dataclass_fields__, 0.0)
        self._on_host: dict[int, weakref.ref[Any]] = {}
        self._outer: Counting | None = None
        self._recomputing_for: int | None = None
        self.guessed: set[str] = set()

    def __enter__(self) -> Counting:
        global _current
        self._outer, _current = _current, self
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        _current, self._outer = self._outer, None

    def counts(self) -> StepCounts:
        """Everything counted so far."""
        return StepCounts(**self._sums)

    def mode(self) -> TorchDispatchMode:
        """A dispatch mode that shows this counter every operator."""
        return _Seeing(self)

    # ---------------------------------------------------------------- what is no operator

    def kernel(
        self,
        *,
        bytes_moved: float = 0.0,
        flops: float = 0.0,
        half: bool = True,
        launches: int = 1,
        captured: int | None = None,
    ) -> None:
        """A kernel of our own, started from Python."""
        self._sums["bytes_moved"] += bytes_moved
        self._sums["half_flops" if half else "full_flops"] += flops
        self._sums["launches"] += launches
        self._sums["scripted"] += launches
        self._sums["graph_launches"] += 0 if captured is None else captured - launches

    def add(self, counts: StepCounts) -> None:
        """What was counted elsewhere, or happens once more."""
        for name in self._sums:
            self._sums[name] += getattr(counts, name)

    def product(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
        """A matrix product of our own."""
        self._sums[self._field("mm", dtype)] += 2.0 * rows * inner * columns
        elements = rows * inner + inner * columns + rows * columns
        self._sums["product_bytes"] += elements * dtype.itemsize
        self._sums["launches"] += 1
        self._sums["products"] += 1

    def to_host(self, nbytes: float) -> None:
        """A copy from the device to the host."""
        self._sums["to_host_bytes"] += nbytes

    def to_device(self, nbytes: float) -> None:
        """A copy from the host to the device."""
        self._sums["to_device_bytes"] += nbytes

    def host_update(self, parameters: float) -> None:
        """Parameters that the CPU updates."""
        self._sums["host_parameters"] += parameters

    def on_host(self, tensor: torch.Tensor) -> None:
        """In the real run this tensor is in host memory; copying it is moving it to the device."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._on_host:
            gone = self._on_host.pop
            self._on_host[key] = weakref.ref(storage, lambda _: gone(key, None))

    def on_device(self, tensor: torch.Tensor) -> None:
        """It was in host memory and has been moved."""
        self._on_host.pop(tensor.untyped_storage()._cdata, None)

    # --------------------------------------------------------------------------- operators

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """One operator that has run."""
        # Backward keeps no graph of its own: where one is made, a layer is computed again.
        node = _BACKWARD_NODE() if torch.is_grad_enabled() else None
        if node is not None and node._sequence_nr() != self._recomputing_for:
            self._recomputing_for = node._sequence_nr()
            self._sums["recomputations"] += 1
        kind = _kind(func)
        if kind.free:
            # Memory made beside a host tensor (`empty_like`) is host memory.
            if self._on_host and any(map(self._is_on_host, tensors_in(args))):
                for tensor in tensors_in(out):
                    self.on_host(tensor)
            return
        read = list(tensors_in(args)) + list(tensors_in(tuple((kwargs or {}).values())))
        if self._on_host and self._crosses(func, read, out):
            return
        nbytes = _traffic(kind, args, read, out)
        if nbytes == 0:
            return
        self._sums["launches"] += _launches(kind, args, read)
        if not kind.known:
            self.guessed.add(kind.name)
        if kind.flops is None and kind.attention is None:
            self._sums["bytes_moved"] += nbytes
            return
        self._sums["product_bytes"] += nbytes
        self._sums["products"] += "attention" not in kind.name
        precision = next((t.dtype for t in read if t.is_floating_point()), torch.float32)
        self._sums[self._field(kind.name, precision)] += self._flops(kind, args, kwargs or {}, out)

    def _field(self, name: str, precision: torch.dtype) -> str:
        if "attention" in name:
            return "half_attention_flops" if precision in _HALF else "full_attention_flops"
        if precision in _HALF:
            return "half_flops"
        return "tf32_flops" if self._tf32 else "full_flops"

    def _flops(self, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        """By our formula, by torch's, or by a guess, whose operator is then `guessed`."""
        packed = _PACKED_ATTENTION.get(kind.name)
        if packed is not None and args[packed[1]] is not None:
            query_at, offsets_at, longest_at, products = packed
            query, offsets = args[query_at], args[offsets_at]
            # Pairs of a token and one it attends to, over all texts.
            if isinstance(offsets, FakeTensor):
                each = args[longest_at] if self._attended_tokens is None else self._attended_tokens
                pairs = query.shape[-3] * float(each)
            else:
                with unset_fake_temporarily():
                    pairs = float(offsets.diff().double().square().sum())
            return float(2 * products * pairs * query.shape[-2] * query.shape[-1])
        try:
            if kind.attention is not None:
                return _attention_flops(kind.name, *(args[place] for place in kind.attention))
            if (left := _LEFT_FACTORS.get(kind.name)) is not None:
                return float(2 * args[left].numel() * args[left + 1].shape[-1])
            assert kind.flops is not None
            return float(kind.flops(*args, **kwargs, out_val=out))
        except Exception:  # a formula may assert anything of shapes it was not written for
            self.guessed.add(kind.name)
            # As if each number that comes out were a product over the first input's last dimension.
            inner = next((t.shape[-1] for t in tensors_in(args) if t.dim() > 1), 1)
            return 2.0 * inner * sum(t.numel() for t in tensors_in(out))

    # --------------------------------------------------------------------- tensors on the host

    def see_on_host(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """One operator that the CPU runs, wherever its inputs are."""
        for tensor in tensors_in(out):
            self.on_host(tensor)
        if "adam" in _kind(func).name:
            self.host_update(sum(t.numel() for t in tensors_in(args)) / _ADAM_TENSORS)

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def _crosses(self, func: Any, read: list[torch.Tensor], out: Any) -> bool:
        """Whether this is no kernel: it crosses the bus, or the CPU does it."""
        places = [self._is_on_host(tensor) for tensor in read]
        if not any(places):
            return False
        if _kind(func).name == "copy_" and len(read) == 2 and places[0] != places[1]:
            # It travels as it is; where the types differ, one side converts it.
            nbytes = min(read[0].nbytes, read[1].nbytes)
            (self.to_host if places[0] else self.to_device)(nbytes)
            return True
        if not all(places):
            return False
        if _kind(func).name in _MOVES:
            self.to_device(sum(tensor.nbytes for tensor in read))
            return True
        self.see_on_host(func, tuple(read), out)
        return True


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counter: Counting) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._counter.see(func, args, kwargs, out)
        return out


@cache
def _kind(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _Kind(str(func), free=False, mutated=(), flops=None, attention=None, known=False)
    name = schema.name.split("::")[-1]
    is_view = any(
        one.alias_info is not None and not one.alias_info.is_write for one in schema.returns
    )
    mutated = tuple(
        place
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    flops = flop_registry.get(getattr(func, "overloadpacket", None))
    if flops is None and name.endswith("_"):
        flops = flop_registry.get(getattr(_aten, name.removesuffix("_"), None))
    places = {one.name: place for place, one in enumerate(schema.arguments)}
    attention = None
    if "attention" in name and {"query", "key", "value"} <= places.keys():
        attention = (places["query"], places["key"], places["value"])
    return _Kind(name, is_view or name in _FREE, mutated, flops, attention)


def _attention_flops(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> float:
    """Arithmetic of an attention whose texts are padded; every head of the query counts.

        forward     2 b h q k (d + e)        scores, and their product with the values
        backward    2 b h q k (3 d + 2 e)    the scores again, and four gradients

    for h heads of the query, q and k tokens, keys d and values e wide. Keys that several heads
    share (grouped-query attention) are multiplied with each of these. torch's own formula
    refuses them (2.11).
    """
    heads_at, tokens_at = (-3, -2) if name.startswith("_scaled_dot_product") else (-2, -3)
    rows = math.prod(query.shape[:-3])
    pairs = rows * query.shape[heads_at] * query.shape[tokens_at] * key.shape[tokens_at]
    width, value_width = query.shape[-1], value.shape[-1]
    if "backward" in name:
        return 2.0 * pairs * (3 * width + 2 * value_width)
    return 2.0 * pairs * (width + value_width)


def _traffic(kind: _Kind, args: tuple[Any, ...], read: list[torch.Tensor], out: Any) -> float:
    """Bytes an operator reads and writes; each tensor once, however often it is named."""
    written = {id(t): t for t in tensors_in(out)}
    for place in kind.mutated:
        if place < len(args):
            written |= {id(t): t for t in tensors_in((args[place],))}
    writes = sum(map(_extent, written.values()))
    if kind.name in _GATHERS:
        return 2 * writes + sum(t.nbytes for t in read[1:])
    if kind.name == "embedding_dense_backward":
        return writes + 3 * _extent(read[0])  # zeroed whole; rows are read, added and written
    unique = {id(t): t for t in (read[1:] if kind.name in _UNREAD_FIRST else read)}
    return writes + sum(map(_extent, unique.values()))


def _extent(tensor: torch.Tensor) -> int:
    """What is really there of a tensor: one that was expanded is read from the cache."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _launches(kind: _Kind, args: tuple[Any, ...], read: list[torch.Tensor]) -> int:
    if args and isinstance(args[0], (list, tuple)) and kind.name.startswith(("_foreach", "_fused")):
        elements = sum(t.numel() for t in tensors_in((args[0],)))
        return max(math.ceil(elements / _LIST_ELEMENTS), 1)
    if kind.name == "embedding_dense_backward":
        return _SORTING_KERNELS if read[1].numel() > _SORTED_FROM else 2
    return _KERNELS.get(kind.name, 1)
