"""What this machine reaches, measured in about a second: the time model's own units.

Products are timed at a classifier's sizes (a batch of some 2,700 tokens, 1024 wide), since the
rates of data sheets are for larger ones. Each number is the best of a few short runs: whatever
else the machine does can only make a run slower.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import psutil
import torch

from memfit import cache
from memfit.errors import ConfigError
from memfit.half_on_cpu import half_on_cpu
from memfit.memory.cards import DeviceProfile, Speeds, this_card
from memfit.messages import Message

_TOKENS, _WIDTH = 2688, 1024
_CPU_TOKENS, _CPU_WIDTH = 256, 512
_COPY_BYTES, _CPU_COPY_BYTES = 1 << 27, 1 << 25
_BUS_BYTES = 1 << 26
_UPDATED_PARAMETERS = 1 << 24
_UPDATE_BYTES = 28
"""fp32 AdamW reads weight, gradient and two moments and writes three of them."""
_LAUNCHES = 64
_REPEATS, _ENOUGH_SECONDS = 3, 0.2
"""A measurement is repeated, unless that would take long."""


def calibrate(device: str | torch.device = "cuda") -> DeviceProfile:
    """The device's profile with speeds as measured here; cached for the process.

    A CPU's profile says how fast it computes and how much memory there is, nothing of CUDA.
    """
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        raise ConfigError(
            Message("only CUDA devices and CPUs can be calibrated, not {kind}", kind=repr(kind))
        )
    index = torch.device(device).index or 0
    return _of_card(index) if kind == "cuda" else _of_cpu()


@functools.cache
def _of_card(index: int) -> DeviceProfile:
    card = this_card(index)
    if card is None:
        raise ConfigError(Message("there is no CUDA device to calibrate"))
    key = {"card": card.name, "bytes": card.total_bytes, "cpu": cache.processor()}
    return dataclasses.replace(card, reached=_kept(key, lambda: _measure_card(card, index)))


def _kept(key: dict[str, Any], measure: Callable[[], Speeds]) -> Speeds:
    """The speeds an earlier run measured, so that the same command comes to the same plan."""
    name = f"speeds-{cache.digest({**key, 'installed': cache.installed()})}.json"
    values = cache.remembered(name) if cache.is_used() else None
    with suppress(TypeError, ValueError, AttributeError):
        found = {one: float(value) for one, value in (values or {}).items()}
        if all(math.isfinite(value) and value > 0 for value in found.values()):
            return Speeds(**found)
    speeds = measure()
    cache.remember(name, dataclasses.asdict(speeds))
    cache.tidy("speeds-*.json")
    return speeds


def _measure_card(card: DeviceProfile, index: int) -> Speeds:
    timer = _CudaTimer(torch.device("cuda", index))
    half = torch.bfloat16 if card.has_bf16 else torch.float16
    with _products("ieee"):
        fp32 = timer.rate(*_product(timer.device, torch.float32, _TOKENS, _WIDTH))
    with _products("tf32"):
        tf32 = timer.rate(*_product(timer.device, torch.float32, _TOKENS, _WIDTH))
    speeds = Speeds(
        half_flops=timer.rate(*_product(timer.device, half, _TOKENS, _WIDTH)),
        tf32_flops=tf32,
        fp32_flops=fp32,
        memory_bytes_per_second=timer.rate(*_copy(timer.device, _COPY_BYTES)),
        bus_bytes_per_second=timer.rate(*_bus(timer.device)),
        launch_seconds=_launch_seconds(timer.device, timer.wait),
        host_parameters_per_second=_updated_a_second(),
    )
    torch.cuda.empty_cache()
    return speeds


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


@functools.cache
def _of_cpu() -> DeviceProfile:
    in_half = half_on_cpu().bfloat16  # asked before the first product
    key = {"cpu": cache.processor(), "half": in_half}
    speeds = _kept(key, lambda: _measure_cpu(in_half=in_half))
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

    def wait(self) -> None:
        """Until what was asked for is done."""

    def seconds(self, work: Work) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def rate(self, amount: float, work: Work) -> float:
        """The best of a few runs; the first, which also loads the kernel, counts if it must."""
        return amount / _best(lambda: self.seconds(work))


class _CudaTimer(_Timer):
    """By the device's own clock, so that starting the kernels is not counted."""

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


def _bus(device: torch.device) -> tuple[float, Work]:
    host = torch.zeros(_BUS_BYTES // 4, pin_memory=True)
    there = torch.empty_like(host, device=device)
    return 1.0 * _BUS_BYTES, lambda: there.copy_(host, non_blocking=True)


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

    return _best(seconds) / operators


def _best(measure: Callable[[], float]) -> float:
    started = time.perf_counter()
    best = measure()
    for _ in range(_REPEATS):
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
