"""What training on several ranks takes of each rank's memory, and of a step's time.

    DDP     buckets as large as all gradients, beside the gradients; summed once a step, which is
            2 (N - 1) / N of their bytes each way for a ring of N ranks. What does not hide behind
            the backward of the last micro-batch, two thirds of its time, is waited for.
    FSDP2   1/N of weights, gradients and state, and a few whole layers at a time. All weights are
            gathered twice in every micro-batch and the gradients summed once; the computation
            beside it takes a fifth longer. gloo gathers while nothing is computed.
    NCCL    buffers on each card, outside the allocator

None of it was measured on several cards here: figures are others', with their source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.memory.components import Component
from memfit.memory.tracing.depth import Mark, Segments, sized, surviving
from memfit.units import MIB

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.planner.task import Task

_NCCL_PAIR_BYTES, _NCCL_GROUP_BYTES = 544 * MIB, 688 * MIB
"""One communicator of two cards, and of more: https://github.com/NVIDIA/nccl/issues/964 (2023, four
A100). It grows with the channels a link needs, so less is likely without NVLink; but somebody saw
1.6 GB, perhaps with the context (NVIDIA/nccl#864)."""

_THROUGH_HOST_BYTES_PER_SECOND = 10e9
"""Between cards that cannot reach each other's memory, by way of the host's: NCCL counts on 10 GB/s
between two sockets (log in NVIDIA/nccl-tests#307) and 12 of PCIe 3 with 16 lanes (NVIDIA/nccl#864).
It may be much less: two RTX 3090 reached 3.8 (NVIDIA/nccl#2366)."""

_BUS_SHARE = 0.63
"""The share of a narrower bus that NCCL reaches: 10 of the 15.8 GB/s of 16 lanes of PCIe 3."""

_NVLINK_SHARE = 0.75
"""Of the data sheet's bandwidth one way: NCCL's people say 350 GB/s of an H100's 450
(NVIDIA/nccl#864)."""

_GLOO_BYTES_PER_SECOND = 1e9
"""Between processes of one CPU, whose cores also compute: two on two cores summed 32 MiB at 1.4."""

_BACKWARD_SHARE = 2 / 3
"""Backward takes twice as long as forward."""

_GATHERING_SHARE = 0.2
"""What gathering weights costs the computation it runs beside: 5,782 samples a second by FSDP where
DDP had 6,980, on four V100 (https://sbert.net/docs/sentence_transformer/training/distributed.html).
"""

_GATHERED_LAYERS = 4
"""Layers whose whole size `fully_shard` holds in backward: weights, those of the next layer on
their way, gradients, and the flat buffer they are summed in."""

_GATHERED_TABLES = 2
"""The same of an embedding, whose weights backward does not need."""

_FP32_BYTES = 4

_COUNTER_BYTES = 16
"""An optimizer's smaller blocks are step counts and flags, which every rank has."""


@dataclass(frozen=True)
class RankCost:
    """What the other ranks take of one rank's step."""

    nccl_bytes: int
    sent_bytes: int
    """Gradients: once a step by DDP, once a micro-batch by FSDP2."""
    gathered_bytes: int
    """Weights that other ranks keep, in a step."""
    seconds: float
    """On the bus, a step."""
    waited_seconds: float
    """What of that the step waits for."""


def nccl_bytes(task: Task) -> int:
    """What NCCL holds on the card; gloo, for CPUs and ranks that share a card, holds nothing."""
    if task.ranks == 1 or task.card is None or task.args.ddp_backend == "gloo":
        return 0
    return _NCCL_PAIR_BYTES if task.ranks == 2 else _NCCL_GROUP_BYTES


def link_bytes_per_second(card: DeviceProfile | None) -> float:
    """Bytes a second from one rank to the next."""
    if card is None:
        return _GLOO_BYTES_PER_SECOND
    if card.nvlink_bytes_per_second:
        return _NVLINK_SHARE * card.nvlink_bytes_per_second
    return min(_BUS_SHARE * card.bus_bytes_per_second, _THROUGH_HOST_BYTES_PER_SECOND)


def rank_cost(
    task: Task,
    gradient_bytes: float,
    step_seconds: float,
    *,
    micro_batches: float,
    divided: bool,
) -> RankCost:
    """Of a step that takes so long on a rank by itself; `divided` weights are FSDP2's."""
    each_way = (task.ranks - 1) / task.ranks / link_bytes_per_second(task.card)
    if not divided:
        seconds = 2 * each_way * gradient_bytes
        hidden = _BACKWARD_SHARE * step_seconds / max(micro_batches, 1.0)
        waited, sent, gathered = max(seconds - hidden, 0.0), gradient_bytes, 0.0
    else:
        sent, gathered = micro_batches * gradient_bytes, 2 * micro_batches * gradient_bytes
        seconds = waited = (sent + gathered) * each_way
        if nccl_bytes(task):
            waited = max(seconds - step_seconds, _GATHERING_SHARE * step_seconds)
    return RankCost(nccl_bytes(task), round(sent), round(gathered), seconds, waited)


def gathered_bytes(sizes: Iterable[int], depth: int) -> int:
    """What FSDP2 holds whole at once, of a model of so many layers and these parameters."""
    counts = Counter(sizes)
    layer = sum(size * (count // depth) for size, count in counts.items())
    return _FP32_BYTES * max(_GATHERED_LAYERS * layer, _GATHERED_TABLES * max(counts))


def on_ranks(segments: Segments, ranks: int, whole_bytes: int) -> Segments:
    """The run of one of several ranks, from that of a process by itself.

    DDP adds its buckets. FSDP2 divides every weight, gradient and moment, and holds `whole_bytes`
    of them while a micro-batch runs; 0: by DDP.
    """
    if ranks == 1:
        return segments
    parts = dict(segments.parts)
    if not whole_bytes:
        micro = parts["micro"]
        gradients = (micro[place].kind for place in surviving(micro))
        buckets = sum(size for size, component, _ in gradients if component is Component.GRADIENTS)
        parts["start"] = [*parts["start"], _mark(buckets, Component.GRADIENTS)]
        return Segments(parts)
    held = (Component.WEIGHTS, Component.GRADIENTS, Component.OPTIMIZER)
    for name, marks in parts.items():
        parts[name] = [
            sized(mark, 1 / ranks)
            if mark.kind[1] in held and mark.kind[0] > _COUNTER_BYTES
            else mark
            for mark in marks
        ]
    whole = _mark(whole_bytes, Component.WEIGHTS)
    for name in {"micro", "micro_more", "evaluate"} & set(parts):
        parts[name] = [whole, *parts[name], whole._replace(birth=False)]
    return Segments(parts)


def _mark(size: int, component: Component) -> Mark:
    return Mark(True, (size, component, "ranks"), "")
