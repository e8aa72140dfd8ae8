"""How long a step takes, from what it does: arithmetic, traffic, launches, the bus, the host.

    device = products + attention + other kernels' traffic + a fixed time for every kernel
    launch = what the host needs to start them from Python; graphs need none of it
    step   = the longest of device, launch and bus, plus the host's own update and loop,
             plus a share of the bus

The device computes while the host is ahead of it, and copies run beside both, so the longest
decides; copies that are hidden still take bandwidth and queues from what hides them. Rates are
those calibration measures; the constants below say what a step makes of them. They were fitted to
steps of BERT-Large on one H200, with their profiled kernels (benchmarks/results:
step_time_h200.json, bert_large_h200.json): within 5 % where the card decides. Where Python does,
hosts of that one card differ by 1.6 times, and that is all that can be said of one that is not
measured. Of cards that were never measured the data sheet's speeds are taken times
what the H200 reached: these seconds rank plans.
"""

from __future__ import annotations

from memfit.memory.cards import DeviceProfile, Speeds
from memfit.memory.counts import StepCounts

# What calibration's products and copies reach of a data sheet's figures.
HALF_SHARE, TF32_SHARE, FP32_SHARE = 0.60, 0.49, 0.67
COPY_SHARE, BUS_SHARE = 0.88, 0.88
PRODUCT_FACTOR = 1.1
"""A step's products against calibration's rate, in bf16 and in fp32 alike; packed batches, whose
products have odd sizes, reach a tenth less in fp32."""
HALF_ATTENTION_FACTOR, FULL_ATTENTION_FACTOR = 1.1, 0.52
"""Attention against the rate of fp32 products: texts are short, so that exponents and dropout, on
the ordinary units, take longer than its products."""
KERNEL_SECONDS = 3.2e-6
"""A kernel's start and end on the device, when nothing waits for the host."""
PYTHON_FACTOR = 3.0
"""A step's time for an operator against a bare loop's: modules, hooks, autocast and the Trainer."""
SCRIPT_FACTOR = 20.0
"""On top, for a kernel of Triton, which Python itself prepares and starts."""
PARSE_FACTOR = 9.0
"""On top, for a product launched beside a setting of cuBLAS's workspaces: torch parses it anew each
time. On one host 57 microseconds for `mm` and 165 for `addmm`, where an operator takes 10."""
SHOWN_SHARE = 0.1
"""What of it shows where the card is busier than the host: at a step's beginning nothing waits."""
RECOMPUTE_FACTOR = 85.0
"""On top, for a layer that is computed again: random states, hooks on every saved tensor."""
STEP_FACTOR = 480.0
"""The Trainer's loop, in operators: the batch, the schedule, callbacks."""
REPLAY_FACTOR = 225.0
"""A micro-batch that a graph runs: it is packed, pinned and copied from Python all the same."""
UPDATE_SHARE = 0.19
"""What an offloaded update reaches of calibration's AdamW, whose states the CPU's cache holds."""
REACH_FACTOR = 1.2
"""Kernels that use host memory in place, against copies one way: both directions are in use."""
HIDDEN_COST = 0.01
"""What shows of a replayed step where Python takes longer, or of Python where the step does: on
another host it is the other way round, so the less of both the better."""
COPIES_COST = 0.15
"""What copies take from what they run beside, of their own time. A guess on the safe side: the one
plan measured with both kinds of copies took 17 % longer than if they had been free."""


def speeds_of(card: DeviceProfile | None) -> Speeds:
    """What the card reaches: measured where it was, else shares of its data sheet.

    None is this machine's CPU, which is measured when first asked for.
    """
    if card is None:
        from memfit.planner.calibration import calibrate

        card = calibrate("cpu")
    if card.reached is not None:
        return card.reached
    # Before 7.0 there are no matrix units, and products in half precision are summed in fp32.
    has_units = card.capability >= (7, 0)
    fp32 = card.fp32_flops * FP32_SHARE
    return Speeds(
        half_flops=card.half_flops * HALF_SHARE if has_units else fp32,
        tf32_flops=card.tf32_flops * TF32_SHARE if card.has_bf16 else fp32,
        fp32_flops=fp32,
        memory_bytes_per_second=card.memory_bytes_per_second * COPY_SHARE,
        bus_bytes_per_second=card.bus_bytes_per_second * BUS_SHARE,
    )


def explain(
    counts: StepCounts, card: DeviceProfile | None, *, parses: bool = False
) -> dict[str, float]:
    """Seconds by cause; see `step_seconds` for how they add up.

    `parses` says that cuBLAS's workspaces are set in the environment.
    """
    speeds = speeds_of(card)
    products = (
        counts.half_flops / speeds.half_flops
        + counts.tf32_flops / speeds.tf32_flops
        + counts.full_flops / speeds.fp32_flops
    ) / (1.0 if is_cpu(card) else PRODUCT_FACTOR)
    attention = (
        counts.half_attention_flops / HALF_ATTENTION_FACTOR
        + counts.full_attention_flops / FULL_ATTENTION_FACTOR
    ) / speeds.fp32_flops
    bytes_per_second = speeds.memory_bytes_per_second
    # A product of few rows waits for its weights instead of its arithmetic.
    waiting = counts.product_bytes / bytes_per_second - products - attention
    kernels = (counts.launches + counts.replayed) * (0.0 if is_cpu(card) else KERNEL_SECONDS)
    reached = counts.reached_bytes / (speeds.bus_bytes_per_second * REACH_FACTOR)
    parsed = counts.products * (PARSE_FACTOR if parses else 0.0)
    operators = (
        counts.launches * PYTHON_FACTOR
        + counts.scripted * SCRIPT_FACTOR
        + counts.recomputations * RECOMPUTE_FACTOR
        + parsed
    )
    return {
        "compute": products + attention,
        "memory": counts.bytes_moved / bytes_per_second + max(waiting, 0.0) + kernels + reached,
        "launch": operators * speeds.launch_seconds,
        "bus": (counts.to_host_bytes + counts.to_device_bytes) / speeds.bus_bytes_per_second,
        "host": counts.host_parameters / (speeds.host_parameters_per_second * UPDATE_SHARE)
        + (STEP_FACTOR + REPLAY_FACTOR * counts.replays + SHOWN_SHARE * parsed)
        * speeds.launch_seconds,
    }


def step_seconds(counts: StepCounts, card: DeviceProfile | None, *, parses: bool = False) -> float:
    """One step; on a CPU nothing runs beside anything else."""
    parts = explain(counts, card, parses=parses)
    device, host = parts["compute"] + parts["memory"], parts["host"]
    if is_cpu(card):
        return device + parts["launch"] + host
    copies = COPIES_COST * parts["bus"]
    if counts.replayed > counts.launches:
        # A replayed step is queued and the loop goes on: one is nearly hidden behind the other.
        launched = parts["launch"] + host
        shown = HIDDEN_COST * min(device, launched)
        return max(device, parts["bus"], launched) + shown + copies
    return max(device, parts["launch"], parts["bus"]) + host + copies


def is_cpu(card: DeviceProfile | None) -> bool:
    """Whether this is no card at all."""
    return card is None or card.capability == (0, 0)
