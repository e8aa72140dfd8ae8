"""Everything `memfit doctor` reports: what stands in the way, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from memfit.doctor.environment import Environment, TorchBuild, look_around
from memfit.doctor.reach import ROWS, TOKENS, Reach, Readiness, reaches, readiness
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
"""A note says how much of a card others hold, from this share on."""


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
    """Everything to know about this machine, problems first."""
    every = [*_about_packages(found), *_about_cards(found)]
    if found.half_on_cpu is not None and (sentence := found.half_on_cpu.sentence()):
        every.append(Finding("note", sentence))
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


def _about_packages(found: Environment) -> Iterator[Finding]:
    """Packages that are missing or too old, and a torch that cannot be imported."""
    for one in found.packages:
        if not one.required or not one.lacking:
            continue
        if one.version:
            text = N_("{name} is {version} here; memfit needs {wanted}")
        elif one.wanted:
            text = N_("{name} is not installed; memfit needs {wanted}")
        else:
            text = N_("{name} is not installed")
        text = t(text, name=one.name, version=one.version, wanted=one.wanted)
        yield Finding("problem", text, one.command, True)
    torch, error = found.package("torch"), found.torch.error
    if error and torch.version is not None:
        is_dll = found.system == "Windows" and ("WinError" in error or "DLL" in error)
        text = t(
            N_(
                "torch cannot be imported: {error}; install Microsoft's Visual C++ "
                "Redistributable (x64) and try again"
            )
            if is_dll
            else N_("torch cannot be imported: {error}"),
            error=error,
        )
        yield Finding("problem", text, f'pip install --force-reinstall "torch{torch.wanted}"', True)


def _about_cards(found: Environment) -> Iterator[Finding]:
    """A card that this torch or this driver cannot use, and who else holds its memory."""
    build, driver, wanted = found.torch, found.driver, found.package("torch").wanted
    if not build.error and not build.sees_gpu:
        if driver is None or not driver.cards:
            yield Finding("note", t("no NVIDIA GPU was found: memfit trains on the CPU"))
        else:
            card = driver.cards[0]
            text = (
                N_(
                    "torch {version} was built without CUDA and leaves the {card} unused: memfit "
                    "would train on the CPU"
                )
                if build.cuda is None
                else N_(
                    "torch {version} for CUDA {cuda} cannot use the {card}: driver {driver} "
                    "runs CUDA {newest} at most, or CUDA_VISIBLE_DEVICES hides the card; "
                    "update the driver or take another build of torch"
                )
            )
            fields = {"version": build.version, "cuda": build.cuda, "card": card.name,
                      "driver": driver.version,
                      "newest": ".".join(map(str, driver.cuda))}  # fmt: skip
            mend = torch_command(card.capability, driver, wanted)
            yield Finding("problem", t(text, **fields), mend)
    for one in found.cards:
        if build.sees_gpu and driver is not None and lacks_kernels(build, one.capability):
            text = t(
                "torch {version} has no kernels for the {card} (compute capability "
                "{capability}): it would fail with 'no kernel image is available'",
                version=build.version,
                card=one.name,
                capability=".".join(map(str, one.capability)),
            )
            yield Finding("problem", text, torch_command(one.capability, driver, wanted))
        held_bytes = one.total_bytes - one.free_bytes
        if held_bytes > _HELD_SHARE * one.total_bytes:
            text = t(
                "{bytes} of the {card} are in use now; nvidia-smi shows by whom",
                bytes=format_bytes(held_bytes),
                card=one.name,
            )
            yield Finding("note", text)
    if build.sees_gpu and len(found.cards) > 1:
        text = t(
            "there are {count} GPUs; one process trains on the first it sees",
            count=len(found.cards),
        )
        yield Finding("note", text)
    if found.system == "Windows" and found.cards:
        triton = found.package("triton")
        yield from _about_windows(triton.command if triton.lacking else None)


def _about_windows(triton_command: str | None) -> Iterator[Finding]:
    """Triton's command where it is missing, and the driver that moves memory to the host."""
    if triton_command is not None:
        text = t(
            "Windows has no Triton by default: fused_layers is not available and "
            "lowbit_adamw runs in plain torch, slower"
        )
        yield Finding("note", text, triton_command)
    text = t(
        "on Windows the driver may move what does not fit into the computer's own memory, "
        "many times slower, instead of failing; NVIDIA Control Panel, Manage 3D settings, "
        "CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback"
    )
    yield Finding("note", text)


def about_card(card: DeviceProfile) -> Iterator[Finding]:
    """What to know of a card, wherever it is."""
    from memfit.memory.cards import generation

    called, known = generation(card.capability)
    if "wheel" in known:
        text = t(
            "only builds of torch for CUDA {cuda} have kernels for the {card} ({generation}); "
            "torch {last} is the last with such a build",
            cuda=f"{known['wheel'][2:4]}.{known['wheel'][4:]}",
            card=card.name,
            generation=called,
            last=known["last_torch"],
        )
        yield Finding("note", text, f"pip install torch --index-url {_INDEX}/{known['wheel']}")
    if card.capability >= _FIRST_OF_CUDA_13 and not card.matrix_units:
        text = t(
            "the {card} has no tensor cores, whatever its compute capability says: half "
            "precision saves memory, not time, and some people see NaN in fp16 (--no-fp16 "
            "trains without)",
            card=card.name,
        )
        yield Finding("note", text)
    if card.windows:
        yield from _about_windows(None if card.has_triton else "pip install triton-windows")


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
        packages = {
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
        trains = []
        for reach in self.trains:
            line = asdict(reach)
            model = line.pop("model")
            trains.append({"model": model["name"], "id": model["id"], **line})
        return {
            "works": self.works,
            **asdict(self.environment),
            "packages": packages,
            "findings": [asdict(one) for one in self.findings],
            "strategies": {
                one.strategy: {"ready": one.ready, **asdict(one)} for one in self.strategies
            },
            "card": None if self.card is None else asdict(self.card),
            "budget_bytes": self.budget_bytes,
            "task": {"effective_rows": ROWS, "tokens_per_text": TOKENS},
            "trains": trains,
        }


def diagnose(
    gpu: str | None = None, place: CardPlace | None = None, *, table: bool = True
) -> Diagnosis:
    """Looks around; with `gpu`, judges strategies and models for a card that need not be here."""
    found = look_around()
    notes = tuple(findings(found))
    if any(one.fatal for one in notes):
        return Diagnosis(environment=found, findings=notes)
    from memfit.memory.cards import find_card, this_card
    from memfit.planner.task import budget_bytes

    named = None if gpu is None else find_card(gpu, place)
    card, limit_bytes = named, 0
    if named is not None:
        limit_bytes = budget_bytes(named, Budget())
    elif found.torch.sees_gpu and (card := this_card()) is not None:
        free_bytes = found.cards[0].free_bytes
        limit_bytes = Budget().resolve(total_bytes=card.total_bytes, free_bytes=free_bytes)
    if card is not None:
        notes = (*notes, *about_card(card))
    return Diagnosis(
        environment=found,
        findings=notes,
        strategies=tuple(readiness(found, named)),
        card=card,
        budget_bytes=limit_bytes,
        trains=tuple(reaches(card, limit_bytes)) if card is not None and table else (),
    )
