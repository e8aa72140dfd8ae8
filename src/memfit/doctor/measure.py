"""`memfit doctor --measure`: what the rules guess, measured on the user's own card in a minute.

Every measurement stands by itself: one that fails is noted and the rest goes on. What was found
is kept for this user's plans (memory/cards.py) and printed as a row of cards.toml.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit.i18n import N_, t
from memfit.memory import nvml
from memfit.memory.cards import DeviceProfile, Speeds, keep_row, match_card, this_card
from memfit.memory.cuda_context import (
    LOADED_LATER_BYTES,
    drop_workspaces,
    load_libraries,
    with_large_handles,
)
from memfit.memory.out_of_memory import is_out_of_memory
from memfit.planner import step_time
from memfit.units import GIB, MIB
from memfit.waiting import doing

_LEFT_FREE_BYTES = 64 * MIB
"""Filling a card stops here, so that its desktop goes on."""

_FILLS = 256
"""In how many pieces a card is filled."""

_SLOWER = 6.0
"""A piece this many times slower than the others lies in host memory: Windows moved it."""

WHAT = {
    "context": N_("the CUDA context"),
    "usable": N_("memory up to refusal"),
    "flash": N_("flash attention"),
    "efficient": N_("memory-efficient attention"),
    "triton": N_("Triton's kernels"),
    "fp16": N_("half precision in fp16"),
    "bf16": N_("half precision in bf16"),
    "fp16_flops": N_("products in fp16"),
    "bf16_flops": N_("products in bf16"),
    "tf32_flops": N_("products in tf32"),
    "fp32_flops": N_("products in fp32"),
    "memory_bytes_per_second": N_("the card's memory"),
    "bus_bytes_per_second": N_("the bus to the card"),
    "bus_back": N_("the bus back"),
    "launch_seconds": N_("starting kernels"),
    "host_parameters_per_second": N_("updates on the CPU"),
    "row": N_("keeping what was found"),
    "cpu": N_("the CPU's speed"),
}


@dataclass
class Measurements:
    """What was found, by name, and what could not be."""

    device: str
    """The card as the driver names it, or CPU."""
    found: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """The reason by the name of what failed."""
    card: str = ""
    """The card as cards.toml names it, or would."""
    row: dict[str, Any] = field(default_factory=dict)
    """A row of cards.toml; empty for a CPU."""

    def take(self, name: str, measure: Callable[[], Any]) -> Any:
        """Runs one measurement; None where it fails."""
        with doing(t("measuring {what} …", what=t(WHAT[name]))):
            try:
                self.found[name] = measure()
            except Exception as error:  # whatever a driver or a kernel raises, the rest goes on
                text = str(error).strip().splitlines()
                self.failed[name] = f"{type(error).__name__}: {text[0] if text else ''}".rstrip(
                    ": "
                )
        return self.found.get(name)

    def pasted(self) -> str:
        """The row as it stands in cards.toml."""
        return f'"{self.card}" = {_inline(self.row)}' if self.row else ""


def measure(index: int = 0) -> Measurements:
    """Measures this machine's card, or its CPU where there is none, and keeps what it finds."""
    if torch.cuda.is_available():
        return _of_card(index)
    names = ("fp32_flops", "half_flops", "memory_bytes_per_second", "launch_seconds")
    made = Measurements("CPU")
    made.take(
        "cpu", lambda: {name: getattr(step_time.calibrate("cpu").reached, name) for name in names}
    )
    return made


def _of_card(index: int) -> Measurements:
    device = torch.device("cuda", index)
    made = Measurements(torch.cuda.get_device_name(index))
    made.take("context", lambda: contexts(index))
    made.take("usable", lambda: usable(index))
    made.take("fp16", lambda: _half_works(device, torch.float16))
    made.take("bf16", lambda: _half_works(device, torch.bfloat16))
    made.take("flash", lambda: _attends(device, SDPBackend.FLASH_ATTENTION))
    made.take("efficient", lambda: _attends(device, SDPBackend.EFFICIENT_ATTENTION))
    made.take("triton", lambda: _triton_works(device))
    made.take("fp16_flops", lambda: step_time.product_rate(device, torch.float16))
    if "bf16" in made.found:
        made.take("bf16_flops", lambda: step_time.product_rate(device, torch.bfloat16))
    for name, run in step_time.card_rates(device).items():
        made.take(name, run)
    made.take("bus_back", lambda: step_time.bus_back_rate(device))
    made.take("row", lambda: _describe(made, index))
    made.found.pop("row", None)  # it has a place of its own
    return made


def contexts(index: int) -> dict[str, int]:
    """The bytes of an empty context, and of one with a training's libraries.

    Asked before anything else uses the card: where the driver does not tell processes apart
    (Windows, containers), the context is what the card holds more than before.
    """
    with nvml.open_device(index) as books:
        if books is None:
            raise OSError(t("the driver has no counters for this card"))
        before = books.use().used_bytes
        reserved = torch.cuda.memory_reserved(index)

        def own() -> int:
            use = books.use()
            held = use.used_bytes - before if use.own_bytes is None else use.own_bytes
            return held - torch.cuda.memory_reserved(index)

        torch.zeros(1, device=torch.device("cuda", index))
        torch.cuda.synchronize(index)
        empty = own()
        load_libraries(index)
        drop_workspaces()
        if not reserved:
            torch.cuda.empty_cache()
        return {"empty_bytes": empty, "loaded_bytes": own()}


def usable(index: int) -> dict[str, int]:
    """Fills the card until it refuses, pages or is nearly full, and gives all of it back.

    `refused_bytes` were called free and not given.
    """
    device = torch.device("cuda", index)
    free_bytes, total_bytes = nvml.free_and_total_bytes(index)
    outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(index)
    pieces: list[torch.Tensor] = []
    refused = paged = False
    try:
        for piece in _filled(device, free_bytes, max(total_bytes // _FILLS, 32 * MIB)):
            if isinstance(piece, str):
                refused, paged = piece == "refused", piece == "paged"
                break
            pieces.append(piece)
        reached = sum(piece.nbytes for piece in pieces)
    finally:
        pieces.clear()
        torch.cuda.empty_cache()
    lost = max(free_bytes - reached - _LEFT_FREE_BYTES, 0) if refused or paged else 0
    return {
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
        "reached_bytes": reached,
        "refused_bytes": lost,
        "held_by_others_bytes": max(outside_bytes, 0),
        "paged": int(paged),
    }


def _filled(device: torch.device, free_bytes: int, piece_bytes: int) -> Iterator[Any]:
    """Pieces of memory, then why there are no more: `full`, `refused` or `paged`."""
    seconds: list[float] = []
    left = free_bytes
    while left - piece_bytes > _LEFT_FREE_BYTES:
        started = time.perf_counter()
        try:
            piece = torch.zeros(piece_bytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            yield "refused"
            return
        took = time.perf_counter() - started
        if len(seconds) > 8 and took > _SLOWER * statistics.median(seconds) and took > 0.02:
            del piece
            yield "paged"
            return
        seconds.append(took)
        left = min(left - piece_bytes, nvml.free_and_total_bytes(device.index or 0)[0])
        yield piece
    yield "full"


def _half_works(device: torch.device, dtype: torch.dtype) -> bool:
    """A layer forward and backward is finite and near fp32's: a GTX 16xx may give NaN."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError(t("the card has no bf16 units"))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(256, 256, device=device, generator=generator)
    weight = torch.randn(256, 256, device=device, generator=generator) / 16
    exact = x @ weight
    half = weight.to(dtype).requires_grad_()
    made = torch.nn.functional.gelu(x.to(dtype) @ half)
    made.float().square().mean().backward()  # type: ignore[no-untyped-call]
    off = (made.float() - torch.nn.functional.gelu(exact)).abs().max().item()
    if half.grad is None or not torch.isfinite(half.grad).all() or not off < 0.1:
        raise ArithmeticError(t("the numbers are wrong by {off}", off=f"{off:.3g}"))
    return True


def _attends(device: torch.device, backend: SDPBackend) -> bool:
    """Attention runs through this kernel, forward and backward."""
    shape = (2, 4, 64, 64)
    query, key, value = (
        torch.randn(shape, device=device, dtype=torch.float16, requires_grad=True) for _ in range(3)
    )
    with sdpa_kernel(backend):
        made = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        made.sum().backward()  # type: ignore[no-untyped-call]
    if query.grad is None or not torch.isfinite(query.grad).all():
        raise ArithmeticError(t("the numbers are not finite"))
    return True


def _triton_works(device: torch.device) -> bool:
    """One of memfit's own kernels compiles and computes what torch does."""
    from memfit.strategies.fused import fused_kernels_torch, fused_kernels_triton

    first, second, third = torch.randn(3, 64, 64, device=device, dtype=torch.float16)
    parts = (first, second, third)
    for mine, theirs in zip(
        fused_kernels_triton.join(parts), fused_kernels_torch.join(parts), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
    return True


def _describe(made: Measurements, index: int) -> None:
    """Makes the row of what was found, and keeps it."""
    about = torch.cuda.get_device_properties(index)
    known = match_card(about.name, about.total_memory)
    driver = nvml.driver()
    plain = about.name.removeprefix("NVIDIA ").removesuffix(" GPU")
    unlisted = f"{plain.replace(' Laptop GPU', ' Laptop')} {round(about.total_memory / GIB)}GB"
    made.card = unlisted if known is None else known.name
    made.row = row_of(
        made,
        known,
        capability=(about.major, about.minor),
        total_bytes=about.total_memory,
        multiprocessors=about.multi_processor_count,
        versions={
            "system": "Windows" if nvml.has_windows_driver() else platform.system(),
            "driver": "" if driver is None else driver.version,
            "torch": torch.__version__,
        },
    )
    speeds = _speeds(made)
    here = this_card(index)
    if speeds is not None and here is not None and not here.acted:
        step_time.keep_speeds(here, speeds)
    keep_row(made.card, made.row, driver=made.row["driver"], torch=torch.__version__)


def row_of(
    made: Measurements,
    known: DeviceProfile | None,
    *,
    capability: tuple[int, int],
    total_bytes: int,
    multiprocessors: int,
    versions: dict[str, str],
) -> dict[str, Any]:
    """What was measured, as a row of cards.toml; what a data sheet says, where it is known."""
    found, speeds = made.found, _speeds(made)
    row: dict[str, Any] = {"capability": list(capability), "gib": _rounded(total_bytes / GIB)}
    if "usable" in found:
        held = found["usable"]["held_by_others_bytes"]
        context = found.get("context", {}).get("loaded_bytes", 0)
        lost = found["usable"]["refused_bytes"]
        others = max(held - context, 0)
        row["usable_gib"] = _rounded((total_bytes - others - lost) / GIB)
        row["refused_mib"] = round(lost / MIB)
    row["sm"] = multiprocessors
    if known is not None:
        sheet = (known.memory_bytes_per_second, known.fp32_flops, known.half_flops)
    elif speeds is not None:
        sheet = (
            speeds.memory_bytes_per_second / step_time.COPY_SHARE,
            speeds.fp32_flops / step_time.FP32_SHARE,
            speeds.half_flops / step_time.HALF_SHARE,
        )
    else:
        sheet = (0.0, 0.0, 0.0)
    for name, value, unit in zip(("gb_s", "fp32", "half"), sheet, (1e9, 1e12, 1e12), strict=True):
        row[name] = _rounded(value / unit)
    if speeds is not None:
        row["matrix_units"] = speeds.half_flops > 1.5 * speeds.fp32_flops
    if "context" in found:
        loaded = found["context"]["loaded_bytes"] + LOADED_LATER_BYTES
        row["context_mib"] = round(found["context"]["empty_bytes"] / MIB)
        row["loaded_mib"] = round(with_large_handles(loaded, capability) / MIB)
        row["context_from"] = "memfit doctor --measure"
    row |= {name: name in found for name in ("triton", "flash", "efficient", "fp16", "bf16")}
    if speeds is not None:
        names = ("half_flops", "tf32_flops", "fp32_flops", "memory_bytes_per_second")
        row["reached"] = {
            name: float(f"{getattr(speeds, name):.4g}") for name in (*names, "bus_bytes_per_second")
        }
    return row | versions


def _speeds(made: Measurements) -> Speeds | None:
    """All speeds, or None if one is missing."""
    found = made.found
    half = found.get("bf16_flops", found.get("fp16_flops"))
    names = ("tf32_flops", "fp32_flops", "memory_bytes_per_second", "bus_bytes_per_second",
             "launch_seconds", "host_parameters_per_second")  # fmt: skip
    if half is None or any(name not in found for name in names):
        return None
    return Speeds(half_flops=half, **{name: found[name] for name in names})


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _inline(value: Any) -> str:
    """TOML on one line, as the rows of cards.toml are."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
