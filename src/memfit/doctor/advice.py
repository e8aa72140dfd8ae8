"""What stands in the way on this machine, each with the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from memfit.doctor.environment import Card, Environment, TorchBuild
from memfit.memory.nvml import Driver
from memfit.messages import t
from memfit.units import format_bytes

_INDEX = "https://download.pytorch.org/whl"
_FIRST_OF_CUDA_13 = (7, 5)
"""Builds for CUDA 13 (and, since torch 2.11, for 12.8) leave out cards before Turing."""
_BLACKWELL = (10, 0)
"""First compiled for in CUDA 12.8."""
_HELD_SHARE = 0.1
"""A card of which others hold more is worth a word."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know."""

    kind: Literal["problem", "note"]
    """A problem keeps memfit from training, or from using the GPU."""
    text: str
    command: str = ""
    fatal: bool = False
    """Whether nothing can be trained before it is mended."""


def findings(found: Environment) -> list[Finding]:
    """Everything to know, problems first."""
    every = [
        *_packages(found),
        *_torch(found),
        *_cards(found),
        *_windows(found),
        *_cpu(found),
    ]
    return sorted(every, key=lambda one: (not one.fatal, one.kind != "problem"))


def torch_command(capability: tuple[int, int], driver: Driver, wanted: str) -> str:
    """What installs a torch with kernels for this card that this driver can run."""
    if capability < _FIRST_OF_CUDA_13:
        build = "cu126"
    elif driver.cuda >= (13, 0):
        build = "cu130"
    else:
        build = "cu128" if capability >= _BLACKWELL else "cu126"
    return f'pip install --force-reinstall "torch{wanted}" --index-url {_INDEX}/{build}'


def lacks_kernels(build: TorchBuild, capability: tuple[int, int]) -> bool:
    """Whether torch was compiled for other cards than this one.

    Kernels for 8.0 run on 8.6 and 8.9 too, not on 9.0; those marked compute_ are compiled on
    the spot for anything newer.
    """
    major, minor = capability
    for name in build.architectures:
        kind, _, digits = name.partition("_")
        number = "".join(filter(str.isdigit, digits))
        if not number:
            continue
        of = (int(number[:-1]), int(number[-1]))
        if kind == "compute" and of <= capability:
            return False
        if of[0] == major and of[1] <= minor:
            return False
    return bool(build.architectures)


def _packages(found: Environment) -> Iterator[Finding]:
    for one in found.packages:
        if not one.required or not one.lacking:
            continue
        kind = "doctor.package.version" if one.version else "doctor.package.missing"
        if one.version is None and one.wanted:
            kind = "doctor.package.missing.wanted"
        text = t(kind, name=one.name, version=one.version, wanted=one.wanted)
        yield Finding("problem", text, one.command, True)


def _torch(found: Environment) -> Iterator[Finding]:
    build, driver, wanted = found.torch, found.driver, found.package("torch").wanted
    if build.error:
        if found.package("torch").version is not None:
            dll = found.system == "Windows" and ("WinError" in build.error or "DLL" in build.error)
            text = t("doctor.torch.broken.dll" if dll else "doctor.torch.broken", error=build.error)
            yield Finding("problem", text, f'pip install --force-reinstall "torch{wanted}"', True)
        return
    if driver is None or not driver.cards:
        if not build.sees_gpu:
            yield Finding("note", t("doctor.gpu.none"))
        return
    card = driver.cards[0]
    mend = torch_command(card.capability, driver, wanted)
    if build.cuda is None:
        yield Finding("problem", t("doctor.torch.cpu", version=build.version, card=card.name), mend)
    elif not build.sees_gpu:
        text = t(
            "doctor.torch.driver",
            version=build.version,
            cuda=build.cuda,
            card=card.name,
            driver=driver.version,
            newest=".".join(map(str, driver.cuda)),
        )
        yield Finding("problem", text, mend)


def _cards(found: Environment) -> Iterator[Finding]:
    build, wanted = found.torch, found.package("torch").wanted
    if build.sees_gpu and found.driver is not None:
        for card in found.cards:
            if lacks_kernels(build, card.capability):
                capability = ".".join(map(str, card.capability))
                said = {"version": build.version, "card": card.name, "capability": capability}
                mend = torch_command(card.capability, found.driver, wanted)
                yield Finding("problem", t("doctor.torch.kernels", **said), mend)
    if build.sees_gpu and len(found.cards) > 1:
        yield Finding("note", t("doctor.gpus", count=len(found.cards)))
    for card in found.cards:
        yield from _held(card)


def _cpu(found: Environment) -> Iterator[Finding]:
    if found.half_on_cpu is not None and (sentence := found.half_on_cpu.sentence()):
        yield Finding("note", sentence)


def _held(card: Card) -> Iterator[Finding]:
    held_bytes = card.total_bytes - card.free_bytes
    if held_bytes > _HELD_SHARE * card.total_bytes:
        yield Finding("note", t("doctor.held", bytes=format_bytes(held_bytes), card=card.name))


def _windows(found: Environment) -> Iterator[Finding]:
    if found.system != "Windows" or not found.cards:
        return
    triton = found.package("triton")
    if triton.lacking:
        yield Finding("note", t("doctor.windows.triton"), triton.command)
    yield Finding("note", t("doctor.windows.fallback"))
