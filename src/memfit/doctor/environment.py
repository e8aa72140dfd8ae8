"""What there is: Python, packages, torch's build, the driver and its cards.

Nothing here fails because something is broken: finding that out is what it is for.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from memfit.engine.half_on_cpu import HalfOnCpu, half_on_cpu
from memfit.i18n import N_, t
from memfit.memory import nvml

# Optional packages and what each is for. The rest is memfit's own requirements.
OPTIONAL = {
    "triton": N_("kernels of fused_layers and lowbit_adamw on a GPU"),
    "peft": N_("--lora"),
    "matplotlib": N_("curves in the report"),
    "modelscope-hub": N_("models from and to ModelScope"),
    "sentencepiece": N_("tokenizers without a tokenizer.json, such as DeBERTa-v3's"),
    "flash-attn": N_("--attn-implementation flash_attention_2; packing does without"),
    "bitsandbytes": N_("--optim adamw_bnb_8bit of the stock Trainer"),
    "torchao": N_("--optim adamw_torch_8bit of the stock Trainer"),
}

# Where memfit is run from its sources, without metadata that says which versions.
_REQUIRED = ("torch", "transformers", "accelerate", "datasets", "safetensors", "huggingface_hub",
             "scikit-learn", "jinja2", "nvidia-ml-py", "psutil", "rich", "tomli-w",
             "typer")  # fmt: skip

# A package of another name, by platform.
_ON_WINDOWS = {"triton": "triton-windows"}

_INSTALLED_BY = {"flash-attn": "pip install flash-attn --no-build-isolation"}


@dataclass(frozen=True, slots=True)
class Package:
    """One package, installed or not."""

    name: str
    version: str | None
    """None where it is not installed."""
    wanted: str = ""
    """The versions memfit asks for, such as `>=2.11`."""
    required: bool = False
    purpose: str = ""

    @property
    def lacking(self) -> bool:
        """Whether it is missing, or not of a version that is asked for."""
        if self.version is None:
            return True
        from packaging.specifiers import SpecifierSet

        return not SpecifierSet(self.wanted).contains(self.version, prereleases=True)

    @property
    def command(self) -> str:
        """What installs it; quotes that both a Unix shell and Windows' cmd take."""
        name = f'"{self.name}{self.wanted}"' if self.wanted else self.name
        return _INSTALLED_BY.get(self.name, f"pip install {name}")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The torch that is imported here."""

    version: str
    cuda: str | None = None
    """The CUDA it was built with; None for a build without."""
    sees_gpu: bool = False
    architectures: tuple[str, ...] = ()
    """What its kernels were compiled for: sm_75, sm_80, ..."""
    error: str = ""
    """Why it cannot be imported; empty where it can."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU of this machine."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Everything that was found on this machine."""

    memfit: str
    python: str
    system: str
    """Linux, Windows or Darwin, as `platform.system()` says."""
    platform: str
    packages: tuple[Package, ...]
    torch: TorchBuild
    driver: nvml.Driver | None
    cards: tuple[Card, ...]
    host_bytes: int
    host_free_bytes: int
    half_on_cpu: HalfOnCpu | None = None
    """What the CPU makes of half precision; None where a card is trained on instead."""

    def package(self, name: str) -> Package:
        """The package of that name."""
        name = _ON_WINDOWS.get(name, name) if self.system == "Windows" else name
        return next(one for one in self.packages if one.name == name)


def look_around() -> Environment:
    """What this machine has."""
    import psutil

    from memfit._version import __version__

    torch, driver = torch_build(), nvml.driver()
    memory = psutil.virtual_memory()
    return Environment(
        memfit=__version__,
        python=platform.python_version(),
        system=platform.system(),
        platform=platform.platform(),
        packages=tuple(packages(platform.system())),
        torch=torch,
        driver=driver,
        cards=_cards(torch, driver),
        host_bytes=memory.total,
        host_free_bytes=memory.available,
        half_on_cpu=None if torch.error or torch.sees_gpu else half_on_cpu(),
    )


def packages(system: str) -> list[Package]:
    """Required ones first, as memfit's metadata lists them."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("memfit") or _REQUIRED
    except importlib.metadata.PackageNotFoundError:
        lines = _REQUIRED
    required: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for line in lines:
        one = Requirement(line)
        into = wanted if one.marker and "extra" in str(one.marker) else required
        into[one.name] = str(one.specifier)
    found = [
        Package(name, _version(name), specifier, required=True)
        for name, specifier in required.items()
    ]
    for name, purpose in OPTIONAL.items():
        package = _ON_WINDOWS.get(name, name) if system == "Windows" else name
        specifier = wanted.get(package, "")
        found.append(Package(package, _version(package), specifier, purpose=t(purpose)))
    return found


def torch_build() -> TorchBuild:
    """How torch was built, and whether it sees a GPU."""
    try:
        import torch
    except Exception as error:  # a broken library raises what it likes
        installed = _version("torch") or ""
        return TorchBuild(installed, error=f"{type(error).__name__}: {error}".strip())
    sees = torch.cuda.is_available()
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        sees_gpu=sees,
        architectures=tuple(torch.cuda.get_arch_list()) if sees else (),
    )


def _cards(build: TorchBuild, driver: nvml.Driver | None) -> tuple[Card, ...]:
    """The cards that torch can use; if there are none, those the driver reports."""
    if not build.sees_gpu:
        listed = driver.cards if driver is not None else ()
        return tuple(
            Card(one.name, one.capability, one.total_bytes, one.total_bytes - one.used_bytes)
            for one in listed
        )
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = nvml.free_and_total_bytes(index)
        found.append(Card(about.name, (about.major, about.minor), total_bytes, free_bytes))
    return tuple(found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
