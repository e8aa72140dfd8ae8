"""How long a step takes, from what it does and what this machine was measured to reach.

Products are timed at a classifier's sizes (a batch of some 2,700 tokens, 1024 wide), since the
rates of data sheets are for larger ones. Each number is the best of a few short runs: whatever
else the machine does can only make a run slower.

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

import dataclasses
import functools
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import psutil
import torch

from memfit.config import files
from memfit.engine.half_on_cpu import half_on_cpu
from memfit.errors import ConfigError
from memfit.memory.cards import DeviceProfile, Speeds, this_card
from memfit.memory.tracing.counting import StepCounts

_VERSION = 1
"""Version of the measurements below; speeds of another version are measured again."""

_TOKENS, _WIDTH = 2688, 1024

_CPU_TOKENS, _CPU_WIDTH = 256, 512

_COPY_BYTES, _CPU_COPY_BYTES = 1 << 27, 1 << 25

_BUS_BYTES = 1 << 26

_UPDATED_PARAMETERS = 1 << 24

_UPDATE_BYTES = 28
"""fp32 AdamW reads weight, gradient and two moments and writes three of them."""

_LAUNCHES = 64

_REPEATS, _ENOUGH_SECONDS = 3, 0.2

_BUSY_SHARE = 0.5
"""Load per core from which other programs disturb a measurement."""

_CPU_REPEATS = 1000
"""As many as there is time for: a run of a millisecond is ten times slower where another program
has one of the cores, and what is measured once is kept."""
"""A measurement is repeated, unless that would take long."""


def calibrate(device: str | torch.device = "cuda") -> DeviceProfile:
    """The device's profile with speeds as measured here; cached for the process.

    A CPU's profile says how fast it computes and how much memory there is, nothing of CUDA.
    """
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        raise ConfigError(
            "only CUDA devices and CPUs can be calibrated, not {kind}", kind=repr(kind)
        )
    index = torch.device(device).index or 0
    return _of_card(index) if kind == "cuda" else _of_cpu()


@functools.cache
def _of_card(index: int) -> DeviceProfile:
    card = this_card(index)
    if card is None:
        raise ConfigError("there is no CUDA device to calibrate")
    if card.acted:
        return card
    speeds = _kept(_key(card), lambda: _measure_card(card, index))
    return dataclasses.replace(card, reached=speeds)


def _key(card: DeviceProfile) -> dict[str, Any]:
    return {"card": card.name, "bytes": card.total_bytes, "cpu": files.processor()}


def _kept(key: dict[str, Any], measure: Callable[[], Speeds]) -> Speeds:
    """The speeds an earlier run measured, so that the same command comes to the same plan.

    They are the machine's and torch's: an update of memfit keeps them.
    """
    if (found := _read(key)) is not None:
        return found
    speeds = measure()
    _keep(key, speeds)
    return speeds


def _read(key: dict[str, Any]) -> Speeds | None:
    values = files.remembered(_file(key)) if files.cache_is_used() else None
    with suppress(TypeError, ValueError, AttributeError):
        found = {one: float(value) for one, value in (values or {}).items()}
        if all(math.isfinite(value) and value > 0 for value in found.values()):
            return Speeds(**found)
    return None


def keep_speeds(card: DeviceProfile, speeds: Speeds) -> None:
    """Plans for this machine's card are made with these speeds from now on."""
    _keep(_key(card), speeds)


def _keep(key: dict[str, Any], speeds: Speeds) -> None:
    files.remember(_file(key), dataclasses.asdict(speeds))
    files.tidy_cache("speeds-*.json")


def _file(key: dict[str, Any]) -> str:
    below = {"python": platform.python_version(), "torch": torch.__version__}
    return f"speeds-{files.cache_digest({**key, **below, 'version': _VERSION})}.json"


def _measure_card(card: DeviceProfile, index: int) -> Speeds:
    device = torch.device("cuda", index)
    half = product_rate(device, torch.bfloat16 if card.has_bf16 else torch.float16)
    speeds = Speeds(half_flops=half, **{name: run() for name, run in card_rates(device).items()})
    torch.cuda.empty_cache()
    return speeds


def product_rate(
    device: torch.device, dtype: torch.dtype, precision: Literal["ieee", "tf32"] = "ieee"
) -> float:
    """Products a second on a card, at a classifier's sizes."""
    with _products(precision):
        return _CudaTimer(device).rate(*_product(device, dtype, _TOKENS, _WIDTH))


def card_rates(device: torch.device) -> dict[str, Callable[[], float]]:
    """What measures each of a card's `Speeds` but half precision; each may fail by itself."""
    timer = _CudaTimer(device)
    return {
        "tf32_flops": lambda: product_rate(device, torch.float32, "tf32"),
        "fp32_flops": lambda: product_rate(device, torch.float32),
        "memory_bytes_per_second": lambda: timer.rate(*_copy(device, _COPY_BYTES)),
        "bus_bytes_per_second": lambda: timer.rate(*_bus(device)),
        "launch_seconds": lambda: _launch_seconds(device, timer.wait),
        "host_parameters_per_second": _updated_a_second,
    }


def bus_back_rate(device: torch.device) -> float:
    """Bytes a second from a card to pinned host memory."""
    return _CudaTimer(device).rate(*_bus(device, back=True))


def _measure_cpu(*, in_half: bool) -> Speeds:
    cpu, timer = torch.device("cpu"), _Timer()
    fp32 = timer.rate(*_product(cpu, torch.float32, _CPU_TOKENS, _CPU_WIDTH))
    copied = timer.rate(*_copy(cpu, _CPU_COPY_BYTES))
    half = fp32
    if in_half:
        half = timer.rate(*_product(cpu, torch.bfloat16, _CPU_TOKENS // 4, _CPU_WIDTH))
    return Speeds(
        half_flops=half,
        tf32_flops=fp32,
        fp32_flops=fp32,
        memory_bytes_per_second=copied,
        bus_bytes_per_second=copied,  # a copy within one memory
        launch_seconds=_launch_seconds(cpu, lambda: None),
        host_parameters_per_second=copied / _UPDATE_BYTES,
    )


def _speeds_of_cpu(*, in_half: bool) -> Speeds:
    """Measured once, and once more when the machine is quiet if it was busy the first time.

    A neighbour on the other core makes a product ten times slower; kept for good, that would be
    every later run's prediction.
    """
    key = {"cpu": files.processor(), "half": in_half, "repeats": _CPU_REPEATS}
    busy = psutil.getloadavg()[0] > _BUSY_SHARE * (psutil.cpu_count() or 1)
    quiet = _read({**key, "busy": False}) if busy else None
    return quiet or _kept({**key, "busy": busy}, lambda: _measure_cpu(in_half=in_half))


@functools.cache
def _of_cpu() -> DeviceProfile:
    in_half = half_on_cpu().bfloat16  # asked before the first product
    speeds = _speeds_of_cpu(in_half=in_half)
    return DeviceProfile(
        name="CPU",
        capability=(0, 0),
        total_bytes=psutil.virtual_memory().total,
        context_bytes=0,
        multiprocessors=torch.get_num_threads(),
        memory_bytes_per_second=speeds.memory_bytes_per_second,
        fp32_flops=speeds.fp32_flops,
        half_flops=speeds.half_flops,
        measured=True,
        bus_bytes_per_second=speeds.bus_bytes_per_second,
        reached=speeds,
    )


Work = Callable[[], Any]


class _Timer:
    """How much of something is done a second, by the clock."""

    repeats = _CPU_REPEATS

    def wait(self) -> None:
        """Until what was asked for is done."""

    def seconds(self, work: Work) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def rate(self, amount: float, work: Work) -> float:
        """The best of some runs; the first, which also loads the kernel, counts if it must."""
        return amount / _best(lambda: self.seconds(work), self.repeats)


class _CudaTimer(_Timer):
    """By the device's own clock, so that starting the kernels is not counted."""

    repeats = _REPEATS

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds(self, work: Work) -> float:
        make: Any = torch.cuda.Event
        start, end = make(enable_timing=True), make(enable_timing=True)
        with torch.cuda.device(self.device):
            # The device is kept busy while the host queues the work, else its gaps are timed too.
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _product(
    device: torch.device, dtype: torch.dtype, tokens: int, width: int
) -> tuple[float, Work]:
    """The four kinds of product a layer has: to the same width, to four times it, and back."""
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    wide = torch.randn(tokens, 4 * width, device=device, dtype=dtype)
    square = torch.randn(width, width, device=device, dtype=dtype)
    up = torch.randn(width, 4 * width, device=device, dtype=dtype)

    def work() -> None:
        for _ in range(4):
            torch.mm(x, square)
        torch.mm(x, up)
        torch.mm(wide, up.t())
        torch.mm(x.t(), wide)

    return 2.0 * tokens * width * width * (4 + 3 * 4), work


def _copy(device: torch.device, nbytes: int) -> tuple[float, Work]:
    """Read once and written once."""
    source = torch.zeros(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * nbytes, lambda: target.copy_(source)


def _bus(device: torch.device, *, back: bool = False) -> tuple[float, Work]:
    host = torch.zeros(_BUS_BYTES // 4, pin_memory=True)
    there = torch.zeros_like(host, device=device)
    to, source = (host, there) if back else (there, host)
    return 1.0 * _BUS_BYTES, lambda: to.copy_(source, non_blocking=True)


def _launch_seconds(device: torch.device, wait: Callable[[], None]) -> float:
    """The host's time for an operator of a small layer, forward and backward, by its number.

    What a training step takes an operator is a multiple of it, since models have more Python
    around theirs: `timing.PYTHON_FACTOR`.
    """
    weight = torch.zeros(8, 8, device=device, requires_grad=True)
    x = torch.zeros(8, 8, device=device)

    def work() -> None:
        y = x
        for _ in range(_LAUNCHES):
            y = torch.nn.functional.gelu(torch.nn.functional.linear(y, weight))
        y.sum().backward()  # type: ignore[no-untyped-call]

    operators = _LAUNCHES * 6 + 3  # linear, gelu; gelu, two products and a sum of gradients back

    def seconds() -> float:
        wait()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return _best(seconds, _CPU_REPEATS) / operators


def _best(measure: Callable[[], float], repeats: int) -> float:
    started = time.perf_counter()
    best = measure()
    for _ in range(repeats):
        if time.perf_counter() - started > _ENOUGH_SECONDS:
            break
        best = min(best, measure())
    return best


def _updated_a_second() -> float:
    """Parameters a second of AdamW on the CPU, with the threads torch has."""
    parameter = torch.nn.Parameter(torch.zeros(_UPDATED_PARAMETERS))
    parameter.grad = torch.ones(_UPDATED_PARAMETERS)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return _Timer().rate(float(_UPDATED_PARAMETERS), optimizer.step)


@contextmanager
def _products(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """How fp32 products are rounded, for a while; torch refuses the older flags beside this one."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


# What calibration's products and copies reach of a data sheet's figures.
HALF_SHARE, TF32_SHARE, FP32_SHARE = 0.60, 0.49, 0.67

COPY_SHARE, BUS_SHARE = 0.88, 0.88

WITHOUT_UNITS_SHARE = 0.9
"""Products in half precision against fp32's where there are no matrix units (Pascal, GTX 16xx):
they are summed in fp32, and people report them as slower. They save memory, not time."""

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
        card = calibrate("cpu")
    if card.reached is not None:
        return card.reached
    fp32 = card.fp32_flops * FP32_SHARE
    half = card.half_flops * HALF_SHARE if card.matrix_units else fp32 * WITHOUT_UNITS_SHARE
    return Speeds(
        half_flops=half,
        tf32_flops=card.tf32_flops * TF32_SHARE if card.has_bf16 else fp32,
        fp32_flops=fp32,
        memory_bytes_per_second=card.memory_bytes_per_second * COPY_SHARE,
        bus_bytes_per_second=card.bus_bytes_per_second * BUS_SHARE,
    )


def seconds_by_cause(
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
    parts = seconds_by_cause(counts, card, parses=parses)
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
