"""What ranks that train together cost each other: memory on every card, and time of every step.

    NCCL        buffers on each card, outside the allocator
    sent        every learning gradient, once a step: 2 bytes a parameter of low bits, 4 of fp32
    on the bus  2 (N - 1) / N times as much each way, for a ring of N cards
    waited      what does not hide behind the backward of the last micro-batch, which is two thirds
                of its time; replayed graphs send when they are done, so that nothing hides
    weights     sent by who updated them where the optimizer's state is divided: (N - 1) / N times
                their bytes, after the update, with nothing to hide behind
    gathered    all weights twice in every micro-batch where they are divided, and its gradients
                once; (N - 1) / N of them each time, beside the computation, which takes a fifth
                longer for it: the longer of both decides. gloo gathers while nothing is computed.

None of it was measured on several cards here: figures are others', with their source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.engine.exchange import IN_FLIGHT_BYTES
from memfit.units import MIB

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.planner.workload import Workload

NCCL_PAIR_BYTES, NCCL_GROUP_BYTES = 544 * MIB, 688 * MIB
"""One communicator of two cards, and of more: https://github.com/NVIDIA/nccl/issues/964 (2023, four
A100). It grows with the channels a link needs, so less is likely without NVLink; but somebody saw
1.6 GB, perhaps with the context (NVIDIA/nccl#864)."""

THROUGH_HOST_BYTES_PER_SECOND = 10e9
"""Between cards that cannot reach each other's memory, by way of the host's: NCCL counts on 10 GB/s
between two sockets (log in NVIDIA/nccl-tests#307) and 12 of PCIe 3 with 16 lanes (NVIDIA/nccl#864).
It may be much less: two RTX 3090 reached 3.8 (NVIDIA/nccl#2366)."""

BUS_SHARE = 0.63
"""The share of a narrower bus that NCCL reaches: 10 of the 15.8 GB/s of 16 lanes of PCIe 3."""

NVLINK_SHARE = 0.75
"""Of the data sheet's bandwidth one way: NCCL's people say 350 GB/s of an H100's 450
(NVIDIA/nccl#864)."""

GLOO_BYTES_PER_SECOND = 1e9
"""Between processes of one CPU, whose cores also compute: two on two cores summed 32 MiB at 1.4."""

BACKWARD_SHARE = 2 / 3
"""Backward takes twice as long as forward."""


GATHERING_SHARE = 0.2
"""What gathering weights costs the computation it runs beside: 5,782 samples a second by FSDP where
DDP had 6,980, on four V100 (https://sbert.net/docs/sentence_transformer/training/distributed.html).
"""


@dataclass(frozen=True)
class ExchangeCost:
    """What the exchange takes of one rank."""

    nccl_bytes: int
    sent_bytes: int
    """Gradients, once a step."""
    weight_bytes: int
    """Weights that another rank has updated or keeps, once a step."""
    in_flight_bytes: int
    """Of gradients that are not kept where they can be summed."""
    seconds: float
    """On the bus, a step."""
    waited_seconds: float
    """What of that the step waits for."""


def nccl_bytes(workload: Workload, card: DeviceProfile | None) -> int:
    """What NCCL holds on the card; gloo, for CPUs and ranks that share a card, holds nothing."""
    if workload.ranks == 1 or card is None or workload.args.ddp_backend == "gloo":
        return 0
    return NCCL_PAIR_BYTES if workload.ranks == 2 else NCCL_GROUP_BYTES


def link_bytes_per_second(card: DeviceProfile | None) -> float:
    """Bytes a second from one rank to the next."""
    if card is None:
        return GLOO_BYTES_PER_SECOND
    if card.nvlink_bytes_per_second:
        return NVLINK_SHARE * card.nvlink_bytes_per_second
    return min(BUS_SHARE * card.bus_bytes_per_second, THROUGH_HOST_BYTES_PER_SECOND)


def exchange_cost(
    workload: Workload,
    card: DeviceProfile | None,
    sent_bytes: float,
    step_seconds: float,
    *,
    micro_batches: float,
    graphed: bool,
    kept: bool,
    weights_follow: bool = False,
) -> ExchangeCost:
    """Of a step that takes so long on a rank by itself; `kept` gradients are summed in place.

    `weights_follow`: each rank sends the weights it has updated, which are as large as gradients.
    """
    ranks = workload.ranks
    each_way = (ranks - 1) / ranks * sent_bytes / link_bytes_per_second(card)
    hidden = 0.0 if graphed else BACKWARD_SHARE * step_seconds / max(micro_batches, 1.0)
    after = each_way if weights_follow else 0.0
    return ExchangeCost(
        nccl_bytes=nccl_bytes(workload, card),
        sent_bytes=round(sent_bytes),
        weight_bytes=round(sent_bytes) if weights_follow else 0,
        in_flight_bytes=0 if kept or ranks == 1 else round(min(IN_FLIGHT_BYTES, sent_bytes)),
        seconds=2 * each_way + after,
        waited_seconds=max(2 * each_way - hidden, 0.0) + after,
    )


def gathering_cost(
    workload: Workload,
    card: DeviceProfile | None,
    weight_bytes: float,
    step_seconds: float,
    *,
    micro_batches: float,
) -> ExchangeCost:
    """Of a step that computes so long with weights that are divided among the ranks."""
    ranks = workload.ranks
    sent_bytes, gathered_bytes = micro_batches * weight_bytes, 2 * micro_batches * weight_bytes
    each_way = (ranks - 1) / ranks / link_bytes_per_second(card)
    seconds = (sent_bytes + gathered_bytes) * each_way
    waited = seconds
    if nccl_bytes(workload, card):
        waited = max(seconds - step_seconds, GATHERING_SHARE * step_seconds)
    return ExchangeCost(
        nccl_bytes=nccl_bytes(workload, card),
        sent_bytes=round(sent_bytes),
        weight_bytes=round(gathered_bytes),
        in_flight_bytes=0,
        seconds=seconds,
        waited_seconds=waited,
    )
