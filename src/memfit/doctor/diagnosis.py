"""Everything `memfit doctor` tells: what stands in the way, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from memfit.doctor.environment import Card, Environment, TorchBuild, look_around
from memfit.doctor.reach import (
    ROWS,
    TOKENS,
    Cell,
    Reach,
    Readiness,
    reaches,
    readiness,
)
from memfit.i18n import N_, t
from memfit.memory.nvml import Driver
from memfit.units import Budget, format_bytes

if TYPE_CHECKING:
    from memfit.memory.cards import CardPlace, DeviceProfile

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
        kind = (
            N_("{name} is {version} here; memfit needs {wanted}")
            if one.version
            else N_("{name} is not installed")
        )
        if one.version is None and one.wanted:
            kind = N_("{name} is not installed; memfit needs {wanted}")
        text = t(kind, name=one.name, version=one.version, wanted=one.wanted)
        yield Finding("problem", text, one.command, True)


def _torch(found: Environment) -> Iterator[Finding]:
    build, driver, wanted = found.torch, found.driver, found.package("torch").wanted
    if build.error:
        if found.package("torch").version is not None:
            dll = found.system == "Windows" and ("WinError" in build.error or "DLL" in build.error)
            text = t(
                N_(
                    "torch cannot be imported: {error}; install Microsoft's Visual C++ "
                    "Redistributable (x64) and try again"
                )
                if dll
                else N_("torch cannot be imported: {error}"),
                error=build.error,
            )
            yield Finding("problem", text, f'pip install --force-reinstall "torch{wanted}"', True)
        return
    if driver is None or not driver.cards:
        if not build.sees_gpu:
            yield Finding("note", t("no NVIDIA GPU was found: memfit trains on the CPU"))
        return
    card = driver.cards[0]
    mend = torch_command(card.capability, driver, wanted)
    if build.cuda is None:
        yield Finding(
            "problem",
            t(
                "torch {version} was built without CUDA and leaves the {card} unused: memfit "
                "would train on the CPU",
                version=build.version,
                card=card.name,
            ),
            mend,
        )
    elif not build.sees_gpu:
        text = t(
            "torch {version} for CUDA {cuda} cannot use the {card}: driver {driver} "
            "runs CUDA {newest} at most, or CUDA_VISIBLE_DEVICES hides the card; "
            "update the driver or take another build of torch",
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
                yield Finding(
                    "problem",
                    t(
                        "torch {version} has no kernels for the {card} (compute capability "
                        "{capability}): it would fail with 'no kernel image is available'",
                        **said,
                    ),
                    mend,
                )
    if build.sees_gpu and len(found.cards) > 1:
        yield Finding(
            "note",
            t(
                "there are {count} GPUs; one process trains on the first it sees",
                count=len(found.cards),
            ),
        )
    for card in found.cards:
        yield from _held(card)


def _cpu(found: Environment) -> Iterator[Finding]:
    if found.half_on_cpu is not None and (sentence := found.half_on_cpu.sentence()):
        yield Finding("note", sentence)


def _held(card: Card) -> Iterator[Finding]:
    held_bytes = card.total_bytes - card.free_bytes
    if held_bytes > _HELD_SHARE * card.total_bytes:
        yield Finding(
            "note",
            t(
                "{bytes} of the {card} are in use now; nvidia-smi shows by whom",
                bytes=format_bytes(held_bytes),
                card=card.name,
            ),
        )


def _windows(found: Environment) -> Iterator[Finding]:
    if found.system != "Windows" or not found.cards:
        return
    triton = found.package("triton")
    if triton.lacking:
        yield _without_triton(triton.command)
    yield _paging()


def _without_triton(command: str) -> Finding:
    return Finding(
        "note",
        t(
            "Windows has no Triton by default: fused_layers is not available and "
            "lowbit_adamw runs in plain torch, slower"
        ),
        command,
    )


def _paging() -> Finding:
    return Finding(
        "note",
        t(
            "on Windows the driver may move what does not fit into the computer's own memory, "
            "many times slower, instead of failing; NVIDIA Control Panel, Manage 3D settings, "
            "CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback"
        ),
    )


def about_card(card: DeviceProfile) -> Iterator[Finding]:
    """What to know of a card, wherever it is."""
    yield from _wheel(card.name, card.capability)
    if card.capability >= _FIRST_OF_CUDA_13 and not card.matrix_units:
        yield Finding(
            "note",
            t(
                "the {card} has no tensor cores, whatever its compute capability says: half "
                "precision saves memory, not time, and some people see NaN in fp16 (--no-fp16 "
                "trains without)",
                card=card.name,
            ),
        )
    if card.windows and not card.has_triton:
        yield _without_triton("pip install triton-windows")
    if card.windows:
        yield _paging()


def _wheel(name: str, capability: tuple[int, int]) -> Iterator[Finding]:
    """Which build of torch has kernels for an old card."""
    from memfit.memory.cards import generation

    called, known = generation(capability)
    if "wheel" not in known:
        return
    text = t(
        "only builds of torch for CUDA {cuda} have kernels for the {card} ({generation}); torch "
        "{last} is the last with such a build",
        cuda=f"{known['wheel'][2:4]}.{known['wheel'][4:]}",
        card=name,
        generation=called,
        last=known["last_torch"],
    )
    yield Finding("note", text, f"pip install torch --index-url {_INDEX}/{known['wheel']}")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What there is, what is missing, what can be trained."""

    environment: Environment
    findings: tuple[Finding, ...]
    strategies: tuple[Readiness, ...] = ()
    """Empty where torch or transformers cannot be imported."""
    card: DeviceProfile | None = None
    """The card judged for: the one named, or this machine's."""
    budget_bytes: int = 0
    trains: tuple[Reach, ...] = ()

    @property
    def works(self) -> bool:
        """Whether anything can be trained at all."""
        return not any(one.fatal for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self.environment)
        found["packages"] = {
            one.name: {
                "version": one.version,
                "wanted": one.wanted,
                "required": one.required,
                "lacking": one.lacking,
                "purpose": one.purpose,
                "command": one.command if one.lacking else "",
            }
            for one in self.environment.packages
        }
        return {
            "works": self.works,
            **found,
            "findings": [asdict(one) for one in self.findings],
            "strategies": {
                one.strategy: {"ready": one.ready, **asdict(one)} for one in self.strategies
            },
            "card": None if self.card is None else asdict(self.card),
            "budget_bytes": self.budget_bytes,
            "task": {"effective_rows": ROWS, "tokens_per_text": TOKENS},
            "trains": [_line(one) for one in self.trains],
        }


def diagnose(
    gpu: str | None = None,
    place: CardPlace | None = None,
    *,
    table: bool = True,
) -> Diagnosis:
    """Look around; with `gpu`, judge strategies and models for a card that need not be here."""
    found = look_around()
    notes = tuple(findings(found))
    if any(one.fatal for one in notes):
        return Diagnosis(environment=found, findings=notes)
    named = _named(gpu, place)
    card, budget_bytes = _card(found, named)
    if card is not None:
        notes = (*notes, *about_card(card))
    trains: tuple[Reach, ...] = ()
    if card is not None and table:
        trains = tuple(reaches(card, budget_bytes))
    return Diagnosis(
        environment=found,
        findings=notes,
        strategies=tuple(readiness(found, named)),
        card=card,
        budget_bytes=budget_bytes,
        trains=trains,
    )


def _named(gpu: str | None, place: CardPlace | None) -> DeviceProfile | None:
    from memfit.memory.cards import find_card

    return None if gpu is None else find_card(gpu, place)


def _card(found: Environment, named: DeviceProfile | None) -> tuple[DeviceProfile | None, int]:
    """The card to judge for, and what a run may use of it: as `--budget auto` takes it."""
    from memfit.memory.cards import this_card

    if named is not None:
        from memfit.planner.this_machine import budget_bytes

        return named, budget_bytes(named, Budget())
    card = this_card() if found.torch.sees_gpu else None
    if card is None:
        return None, 0
    free_bytes = found.cards[0].free_bytes
    return card, Budget().resolve(total_bytes=card.total_bytes, free_bytes=free_bytes)


def _line(reach: Reach) -> dict[str, Any]:
    cells: dict[str, Cell | None] = {
        "exact": reach.exact,
        "rounding": reach.rounding,
        "allowed": reach.allowed,
    }
    return {
        "model": reach.model.name,
        "id": reach.model.id,
        "problem": reach.problem,
        **{name: None if one is None else asdict(one) for name, one in cells.items()},
    }
