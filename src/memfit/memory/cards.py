"""The cards memfit knows without seeing them, found by the name people use.

What is known, from where and how surely stands in cards.toml. What `memfit doctor --measure` found
out on this machine replaces those figures. It is kept in the cache folder, one file a card, driver
and torch; of several for one card the newest counts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib import resources
from typing import Any

from memfit.config import files
from memfit.errors import ConfigError
from memfit.i18n import t
from memfit.memory.cuda_context import (
    LARGE_WORKSPACE_FROM,
    LOADED_LATER_BYTES,
    PAGE_BYTES,
    SMALL,
    VARIABLE,
    context_range,
    measured_context_bytes,
)
from memfit.units import GIB, MIB

# What a name may carry without changing the card it means.
_NOISE = {"nvidia", "geforce", "tesla", "quadro", "gpu", "graphics", "card", "generation", "hbm3"}
_MODULES = {"sxm", "sxm2", "sxm3", "sxm4", "sxm5"}

# Words in the names of devices that are not NVIDIA's.
_OTHER_MAKERS = {
    "AMD": re.compile(r"amd|radeon|rx\d*(xtx?)?|xtx?|vega|instinct|mi\d{2,3}[ax]?|w[67]\d00|rocm"),
    "Apple": re.compile(r"apple|mac(book)?|mps|m[1-9]"),
    "Intel": re.compile(r"intel|arc|iris|xpu|[ab][3-7][5-8]0"),
    "Huawei": re.compile(r"huawei|ascend|atlas|npu|910[abc]"),
}

_ALIKE = 0.5
"""Names that share less than half of their letters are not suggested."""

ACT_AS = "MEMFIT_ACT_AS"
"""The environment variable that names the card to act as, see `acted_card`."""

_MEMORY = re.compile(r"(\d+)(?:gb|gib|g)")

# A lane's bytes a second by PCIe generation, and the generation by capability.
_LANE_BYTES_PER_SECOND = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
_LANES = 16
_MATRIX_UNITS_FROM = (7, 0)

TRITON_FROM = (7, 0)
"""The first capability Triton compiles for."""

_MB = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a machine reaches in training steps, as opposed to what its data sheet promises."""

    half_flops: float
    """Matrix products in bf16 or fp16."""
    tf32_flops: float
    fp32_flops: float
    memory_bytes_per_second: float
    """Kernels that are not products."""
    bus_bytes_per_second: float
    """Between device and pinned host memory, one way."""
    launch_seconds: float = 8.7e-6
    """The host's time for an operator: autograd and the launch itself.

    A card says nothing of its host. This follows from most of the steps measured on H200s; the
    one host that was calibrated needs 14.2.
    """
    host_parameters_per_second: float = 2.3e9
    """Parameters an AdamW on the CPU updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What decides memory and time on a card, before it is seen."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    """What a process finds on the card."""
    context_bytes: int
    """The CUDA context of a process that trains: kernels and libraries loaded. Of one nobody has
    measured, the most it may take."""
    multiprocessors: int
    memory_bytes_per_second: float
    fp32_flops: float
    half_flops: float
    measured: bool
    """Whether the context was measured; otherwise it follows from the card's size."""
    bus_bytes_per_second: float = 16 * 0.985e9
    """One way, by the PCIe generation and lanes."""
    nvlink_bytes_per_second: float = 0.0
    """To other cards of its kind, one way, all links together; 0 where it has none."""
    reached: Speeds | None = None
    """Speeds as measured; None where only the data sheet speaks."""
    here: bool = False
    """Whether the context is this process' own, with the libraries loaded as they are."""
    acted: bool = False
    """Whether another card acts as this one: the speeds of that other say nothing of it."""
    context_low_bytes: int = 0
    """The least the context may take, where nobody has measured it."""
    matrix_units: bool = True
    """Whether it has tensor cores: a GTX 16xx has capability 7.5, and none."""
    windows: bool = False
    """Whether Windows drives it; only of a card that is not here."""
    reserved_bytes: int = 0
    """What the system and the display hold of it; only of a card that is not here."""
    unknown_bytes: int = 0
    """Kept free because drivers report different totals; only of a card that is not here."""
    triton: bool | None = None
    """Whether Triton is installed there; None where nobody has looked."""

    @property
    def has_triton(self) -> bool:
        """Whether Triton's kernels run there: Windows has no Triton by default."""
        if self.capability < TRITON_FROM:
            return False
        if self.triton is not None:
            return self.triton
        return importlib.util.find_spec("triton") is not None if self.here else not self.windows

    @property
    def usable_bytes(self) -> int:
        """What one process can reach of it."""
        return max(self.total_bytes - self.reserved_bytes - self.unknown_bytes, 0)

    @property
    def margin_bytes(self) -> int:
        """What a plan keeps for what is not known of the card."""
        low = self.context_low_bytes or self.context_bytes
        return self.context_bytes - low + self.unknown_bytes

    @property
    def tf32_flops(self) -> float:
        """Half of the half-precision rate; before 8.0 there is no TF32."""
        return self.half_flops / 2 if self.has_bf16 else self.fp32_flops

    @property
    def has_bf16(self) -> bool:
        """bf16 and flash attention came with capability 8.0."""
        return self.capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class CardPlace:
    """The machine of a card that is not here, as far as somebody said; like this one otherwise."""

    windows: bool | None = None
    display: bool = False
    reserved_bytes: int | None = None
    """What others hold of the card, where that is known."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> CardPlace:
        """From a plan's file, which somebody may have edited."""
        windows, reserved = values.get("windows"), values.get("reserved_bytes")
        return cls(
            windows if isinstance(windows, bool) else None,
            values.get("display") is True,
            reserved if isinstance(reserved, int) else None,
        )

    def apply(self, card: DeviceProfile) -> DeviceProfile:
        """The card in that machine: what is left of its memory, and of its kernels."""
        windows = sys.platform == "win32" if self.windows is None else self.windows
        general = facts()["general"]
        held = self.reserved_bytes
        if held is None and windows:  # its desktop is in it
            held = round(general["windows_share"]["high"] * card.total_bytes)
        elif held is None:
            held = general["display_mb"]["high"] * _MB if self.display else 0
        unknown = 0 if card.measured else general["unknown_share"]["high"]
        return dataclasses.replace(
            card,
            windows=windows,
            reserved_bytes=min(held, card.total_bytes),
            unknown_bytes=round(unknown * card.total_bytes),
        )


def facts() -> dict[str, Any]:
    """cards.toml: `general`, `generations`, `sources` and `cards`, each figure with its source."""
    return _read()


def generation(capability: tuple[int, int]) -> tuple[str, Mapping[str, Any]]:
    """The name of a card's generation, and what is known of it."""
    found = [
        (name, row)
        for name, row in facts()["generations"].items()
        if tuple(row["first"]) <= capability
    ]
    return found[-1] if found else next(iter(facts()["generations"].items()))


def find_card(name: str, place: CardPlace | None = None) -> DeviceProfile:
    """The card meant by a loose name: 'RTX 3050 4GB', 't4', 'NVIDIA A100-SXM4-80GB'.

    It is in a machine like this one, or in the one that `place` describes.
    """
    wanted = _words(name)
    named = {card: _words(card) for card in _table()}
    # PCIe tells two H100s apart; of other cards there is one row for both kinds.
    exact = {card: words for card, words in named.items() if wanted <= words}
    loose = {card: words for card, words in named.items() if wanted - {"pcie"} <= words}
    fits = exact or loose
    if not wanted or not fits:
        raise ConfigError(_unknown(name))
    fewest = min(len(words) for words in fits.values())
    closest = [card for card, words in fits.items() if len(words) == fewest]
    if len(closest) > 1:
        *first, last = closest
        cards = t("{first} or {last}", first=", ".join(first), last=last)
        raise ConfigError("{name} may be {cards}; write which one", name=repr(name), cards=cards)
    found = _profile(closest[0])
    if wanted - named[closest[0]] == {"pcie"}:
        found = dataclasses.replace(found, nvlink_bytes_per_second=0.0)
    if place is None and "usable_gib" in _table()[closest[0]]:  # measured on this machine
        return found
    return (place or CardPlace()).apply(found)


def match_card(name: str, total_bytes: int) -> DeviceProfile | None:
    """The table's card for a device as the driver names it; None when the table lacks it."""
    words = _words(name)
    ranked = []
    for card, row in _table().items():
        model = {word for word in _words(card) if not _MEMORY.fullmatch(word)}
        away_bytes = abs(row["gib"] * GIB - total_bytes)
        if model <= words and away_bytes < 0.15 * total_bytes:
            ranked.append((-len(model), away_bytes, card))
    return _profile(min(ranked)[2]) if ranked else None


def this_card(index: int = 0) -> DeviceProfile | None:
    """The card of this machine with its context as measured; None without a CUDA device.

    Of a card the table lacks, the speeds are guessed from its size: they rank plans, no more.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    if (acted := acted_card()) is not None:
        return acted
    found = torch.cuda.get_device_properties(index)
    context_bytes = measured_context_bytes(index)
    known = match_card(found.name, found.total_memory)
    if known is None:
        capability = (found.major, found.minor)
        known = _profile_like(found.name, capability, found.multi_processor_count)
    if context_bytes is not None:
        context_bytes += LOADED_LATER_BYTES + PAGE_BYTES
    return dataclasses.replace(
        known,
        name=found.name,
        total_bytes=found.total_memory,
        multiprocessors=found.multi_processor_count,
        context_bytes=context_bytes or known.context_bytes,
        measured=context_bytes is not None,
        here=context_bytes is not None,
        context_low_bytes=0,
        windows=False,
        reserved_bytes=0,
        triton=None,
    )


def acted_card() -> DeviceProfile | None:
    """The card that this machine's card acts as, for benchmarks and tests; None: itself.

    `MEMFIT_ACT_AS="GTX 1650"` describes this machine's card by that row of the table: the plan is
    the one for that card, and the run keeps to that card's memory beside its predicted context,
    with the kernels it has. Its speed, its own context and how its kernels cut their work are not
    imitated.
    """
    name = os.environ.get(ACT_AS, "")
    return _act_as(name) if name else None


@functools.cache
def _act_as(name: str) -> DeviceProfile:
    """Switches off what that card lacks, once in a process."""
    import torch

    card = find_card(name)
    torch.backends.cuda.enable_flash_sdp(card.has_bf16)  # came with the same capability
    torch.backends.cuda.enable_cudnn_sdp(card.capability[0] in (9, 10))
    if card.capability < LARGE_WORKSPACE_FROM:
        os.environ.setdefault(VARIABLE, SMALL)
    return dataclasses.replace(card, acted=True, context_bytes=card.context_bytes + PAGE_BYTES)


def _profile_like(name: str, capability: tuple[int, int], multiprocessors: int) -> DeviceProfile:
    """A profile scaled, by multiprocessors, from the table's nearest card of that capability."""
    rows = _table()
    like = min(
        rows,
        key=lambda card: (
            abs(rows[card]["capability"][0] - capability[0]),
            abs(rows[card]["capability"][1] - capability[1]),
            abs(rows[card]["sm"] - multiprocessors),
        ),
    )
    base, scale = _profile(like), multiprocessors / rows[like]["sm"]
    low, high = context_range(capability, multiprocessors)
    return dataclasses.replace(
        base,
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        context_bytes=high,
        context_low_bytes=low,
        memory_bytes_per_second=base.memory_bytes_per_second * scale,
        fp32_flops=base.fp32_flops * scale,
        half_flops=base.half_flops * scale,
        nvlink_bytes_per_second=0.0,
        measured=False,
        reached=None,
    )


def _profile(card: str) -> DeviceProfile:
    row = _table()[card]
    capability = (row["capability"][0], row["capability"][1])
    loaded_mib = row.get("loaded_mib")
    low, high = context_range(capability, row["sm"])
    if loaded_mib is not None:
        low = high = round(loaded_mib * MIB)
    usable_gib = row.get("usable_gib", row["gib"])
    usual_pcie = 3 if capability < (8, 0) else 4 if capability < (9, 0) else 5
    pcie, lanes = row.get("pcie") or (usual_pcie, _LANES)
    return DeviceProfile(
        name=card,
        capability=capability,
        total_bytes=round(row["gib"] * GIB),
        context_bytes=high,
        multiprocessors=row["sm"],
        memory_bytes_per_second=row["gb_s"] * 1e9,
        fp32_flops=row["fp32"] * 1e12,
        half_flops=row["half"] * 1e12,
        measured=loaded_mib is not None,
        bus_bytes_per_second=_LANE_BYTES_PER_SECOND[pcie] * lanes,
        nvlink_bytes_per_second=row.get("nvlink", 0) * 1e9,
        reached=Speeds(**row["reached"]) if "reached" in row else None,
        context_low_bytes=low,
        matrix_units=row.get("matrix_units", capability >= _MATRIX_UNITS_FROM),
        windows=row.get("system") == "Windows",
        reserved_bytes=round((row["gib"] - usable_gib) * GIB),
        triton=row.get("triton"),
    )


@functools.cache
def _read() -> dict[str, Any]:
    text = resources.files("memfit.memory").joinpath("cards.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _table() -> dict[str, dict[str, Any]]:
    """The file's rows, with what was measured on this machine in the place of its figures."""
    cards: dict[str, dict[str, Any]] = dict(_read()["cards"])
    for name, row in kept_rows().items():
        cards[name] = {**cards.get(name, {}), **row}
    return cards


def _words(name: str) -> frozenset[str]:
    """'NVIDIA GeForce RTX3050Ti, 4 GB' -> rtx, 3050, ti, 4gb."""
    text = re.sub(r"(\d+)\s*(gb|gib|g)\b", r" \1gb ", name.lower())
    text = re.sub(r"\b(rtx|gtx)(?=\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d\d\d)(ti|super|m|d)\b", r" \1", text)
    words = re.findall(r"[a-z0-9]+", text.replace("mobile", "laptop").replace("notebook", "laptop"))
    return frozenset(word for word in words if word not in _NOISE and word not in _MODULES)


def _unknown(name: str) -> str:
    """The sentence for a name that no row of the table has."""
    words = _words(name)
    for maker, marks in _OTHER_MAKERS.items():
        if any(marks.fullmatch(word) for word in words):
            return t(
                "{name} is a device of {maker}; for a machine that is not here, memfit plans for "
                "NVIDIA cards and CPUs (--gpu cpu) only",
                name=repr(name),
                maker=maker,
            )
    near = _nearest(words)
    if not near:
        return t("no card {name} is known; write it as in 'RTX 3060' or T4", name=repr(name))
    return t(
        "no card {name} is known; the nearest are {cards}", name=repr(name), cards=", ".join(near)
    )


def _nearest(words: frozenset[str]) -> list[str]:
    """Up to three cards whose names look most like these words, first those of the same number."""

    def likeness(card: str) -> float:
        known = _words(card)
        numbers = any(re.search(r"\d", word) for word in _model(words) & _model(known))
        mine, its = (" ".join(sorted(_model(one))) for one in (words, known))
        return numbers + SequenceMatcher(None, mine, its).ratio()

    by_likeness = {card: likeness(card) for card in _table()}
    best = sorted(by_likeness, key=lambda card: -by_likeness[card])
    return [card for card in best[:3] if by_likeness[card] >= _ALIKE]


def _model(words: Iterable[str]) -> set[str]:
    """The words without the card's memory."""
    return {word for word in words if not _MEMORY.fullmatch(word)}


# ---- measured on this machine ----


_ROW_NUMBERS = ("gib", "sm", "gb_s", "fp32", "half")
"""What a row must have."""

_ROW_SPEEDS = {
    "half_flops", "tf32_flops", "fp32_flops", "memory_bytes_per_second", "bus_bytes_per_second",
}  # fmt: skip


def kept_rows() -> dict[str, dict[str, Any]]:
    """The rows measured on this machine, by the name cards.toml has for the card."""
    if not files.cache_is_used():
        return {}
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        kept = files.cache_folder().glob("card-*.json")
        for path in sorted(kept, key=lambda path: path.stat().st_mtime):
            values = files.remembered(path.name) or {}
            name, row = values.get("card"), values.get("row")
            if isinstance(name, str) and isinstance(row, dict) and _is_whole_row(row):
                found[name] = row
    return found


def keep_row(card: str, row: dict[str, Any], *, driver: str, torch: str) -> None:
    """Keeps a card's row for the plans of this user, in the format of cards.toml."""
    digest = files.cache_digest({"card": card, "driver": driver, "torch": torch})
    files.remember(f"card-{digest}.json", {"card": card, "row": row})
    files.tidy_cache("card-*.json")


def _is_whole_row(row: dict[str, Any]) -> bool:
    """Whether a card can be described by it: somebody may have edited the file."""
    capability, reached = row.get("capability"), row.get("reached", {})
    if not (isinstance(capability, list) and isinstance(reached, dict)):
        return False
    optional = [row.get(name, 1) for name in ("usable_gib", "loaded_mib")]
    numbers = [*capability, *reached.values(), *(row.get(name) for name in _ROW_NUMBERS), *optional]
    known = not reached or set(reached) == _ROW_SPEEDS
    positive = (isinstance(one, (int, float)) and 0 <= one < math.inf for one in numbers)
    return len(capability) == 2 and known and all(positive)
