"""What a strategy is: one memory technique, in one file, behind one contract.

A strategy is a small frozen dataclass; its fields are its settings. It says what it does to the
result (`fidelity`), what it shrinks, what it cannot stand beside, why it may be of no use here,
and it changes a `Setup`: the model, or how the step is run. registry.py has the order, planning.py
the words in which the planner and a strategy talk.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import psutil

from memfit.engine.half_on_cpu import half_on_cpu
from memfit.errors import ConfigError
from memfit.i18n import N_, Message, shown
from memfit.memory import device as device_here
from memfit.memory.cards import TRITON_FROM
from memfit.strategies.planning import (
    Axis,
    Combination,
    Effects,
    Half,
    Option,
    PlanFigures,
    PlanQuestion,
    Tier,
    TracePart,
)
from memfit.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import TrainingArguments

    from memfit.engine.executors import StepExecutor
    from memfit.memory.cards import DeviceProfile
    from memfit.models.layer_stack import Turns
    from memfit.strategies.lowbit.gradient_sinks import LowBitSink
    from memfit.strategies.packing.packed_model import PackedModel


class Fidelity(IntEnum):
    """What a strategy does to the result, best first."""

    EXACT = 0
    """The same numbers up to rounding of the same precision."""
    ROUNDING = 1
    """The same algorithm with fewer bits."""
    OPTIMIZER = 2
    """Another update rule."""
    CAPACITY = 3
    """Fewer weights learn."""
    DATA = 4
    """Texts are cut shorter."""

    def __str__(self) -> str:
        return self.name.lower()


_FIRST_WITH_BF16 = (8, 0)

OptimizerFactory = Callable[["list[dict[str, Any]]", "TrainingArguments"], "torch.optim.Optimizer"]

Collator = Callable[[list[Any]], dict[str, Any]]

ReplaceData = Callable[[Any, Collator], tuple[Any, Collator]]
"""A dataset and its collator in, the dataset and the collator to load from out."""


@dataclass
class Setup:
    """What strategies change before the first step; the Trainer reads it when it trains."""

    model: nn.Module
    args: TrainingArguments
    device: torch.device
    ranks: int = 1
    """How many processes train together."""
    packing: PackedModel | None = None
    sharded: bool = False
    """Whether weights are divided among the ranks: all run, evaluate and save the model at once."""
    make_optimizer: OptimizerFactory | None = None
    make_sink: Callable[..., LowBitSink] | None = None
    """How the low-bit optimizer takes gradients; kept in `.grad` where nothing is said."""
    sink: LowBitSink | None = None
    """What takes the gradients, once the optimizer is made."""
    state_on_host: bool = False
    """Whether the low-bit optimizer's state lies in host memory."""
    gradients_on_host: bool = False
    """Whether gradients that wait in 8 bits lie there, too."""
    stock_loss: bool = True
    """Whether the loss is the model's own, for the labels of the batch."""
    sees_inputs: bool = False
    """Whether a `compute_loss` of the user is handed the inputs, as the collator made them."""
    around_micro_batch: list[Callable[[], AbstractContextManager[Any]]] = field(
        default_factory=list
    )
    """Entered around the loss and the backward of every micro-batch."""
    around_training: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    """Entered around a whole training, for what must not outlast it."""
    wrap_executor: list[Callable[[StepExecutor], StepExecutor]] = field(default_factory=list)
    """Each gets the executor made so far and returns the one to use."""
    replace_data: list[ReplaceData] = field(default_factory=list)
    """Asked in turn for every dataset that is loaded from: training, evaluation and test."""
    train_dataset: Any = None
    """The rows to learn from; None where only memory is asked for."""
    card: DeviceProfile | None = None
    """The CUDA card to judge by where it need not be here; None: the device is."""
    user_set: frozenset[str] | None = None
    """The training arguments the user gave by name; None where that is not known."""
    before_move: list[Callable[[torch.device], None]] = field(default_factory=list)
    """Called before the model goes to the device, for weights that must lie there as one."""
    recomputed: Turns | None = None
    """Which layers are recomputed: its limit may be changed from step to step."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Gives the model back as it was, last change first."""

    @property
    def device_type(self) -> str:
        """The kind of the device that is trained on, see memory/device.py."""
        return "cuda" if self.card is not None else device_here.kind_of(self.device)

    @property
    def capability(self) -> tuple[int, int]:
        """The CUDA card's compute capability."""
        if self.card is not None:
            return self.card.capability
        return device_here.capability(self.device)

    @property
    def lacks_bf16(self) -> str:
        """Why bfloat16 is no choice there; empty where it is one."""
        if self.device_type != "cuda" or self.capability >= _FIRST_WITH_BF16:
            return ""
        version = ".".join(map(str, self.capability))
        return Message(
            "a card of compute capability {version} has no bfloat16 (from 8.0 on)", version=version
        )

    def refuses(self, dtype: str) -> str:
        """Why a CPU cannot compute in this type; empty where it can, and for a card."""
        if self.device_type != "cpu":
            return ""
        return half_on_cpu().reason(dtype)

    @property
    def has_triton(self) -> bool:
        """Whether Triton's kernels run there."""
        return device_here.has_triton() if self.card is None else self.card.has_triton

    @property
    def lacks_triton(self) -> str:
        """Why Triton's kernels do not run there; empty where they do, or where there is no card."""
        if self.device_type != "cuda" or self.has_triton:
            return ""
        if self.capability < TRITON_FROM:
            version = ".".join(map(str, self.capability))
            return Message(
                "its kernels need Triton, which needs a card of compute capability 7.0 at least; "
                "this one has {version}",
                version=version,
            )
        if self.card is not None and self.card.windows:
            return Message("its kernels need Triton, which Windows does not have by default")
        return Message("its kernels need Triton, which is not installed")

    def whole_weights(self) -> dict[str, Any] | None:
        """Weights that are divided among the ranks, on the first; None where there is no need.

        All ranks call it together.
        """
        from memfit.strategies.fully_sharded import gathered

        return gathered(self.model.state_dict()) if self.sharded else None

    def restore(self) -> None:
        """Give the model back as it was before any strategy."""
        while self.undo:
            self.undo.pop()()

    def data_for(self, dataset: Any, collator: Collator) -> tuple[Any, Collator]:
        """What to load instead of this dataset; itself where no strategy replaces it."""
        for replace in self.replace_data:
            dataset, collator = replace(dataset, collator)
        return dataset, collator


def host_shortage(needed_bytes: int) -> str:
    """Why the computer's own memory does not suffice; empty where it does."""
    free_bytes = psutil.virtual_memory().available
    if needed_bytes <= free_bytes:
        return ""
    needed, free = format_bytes(needed_bytes), format_bytes(free_bytes)
    return Message(
        "it needs {needed} of the computer's memory, of which {free} are free",
        needed=needed,
        free=free,
    )


CANNOT_BE_USED = N_("{strategy} cannot be used here: {reason}")


class Strategy(ABC):
    """One memory technique: what it is, what the planner must know of it, what people read."""

    # ---- what it is ----

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """What plans call it, in a few words; its name if empty."""
    reason: ClassVar[str]
    """Why one would want it, in a sentence a user reads."""
    shrinks: ClassVar[tuple[str, ...]]
    conflicts: ClassVar[frozenset[str]] = frozenset()
    """Names of strategies it cannot stand beside."""
    needs_package: ClassVar[str] = ""
    """The optional package it cannot work without."""
    faster_with: ClassVar[str] = ""
    """The optional package it is faster with."""

    @property
    @abstractmethod
    def fidelity(self) -> Fidelity:
        """What it does to the result, with these settings."""

    @property
    def effects(self) -> Effects:
        """What it does to a step, with these settings."""
        return Effects()

    @classmethod
    def called(cls) -> str:
        """Returns what plans call it."""
        return Message(cls.title) if cls.title else cls.name

    @classmethod
    def as_used(cls, half: Half) -> Option:  # noqa: ARG003
        """Returns what it stands on and, last, itself, as one would use it with this precision."""
        return (cls(),)

    def unavailable(self, setup: Setup) -> str:  # noqa: ARG002
        """Why it has no use here, as a `Message`; empty where it has."""
        return ""

    def apply(self, setup: Setup) -> None:
        """Change the setup, or say why that has no use here."""
        if reason := self.unavailable(setup):
            raise ConfigError(Message(CANNOT_BE_USED, strategy=self.name, reason=reason))
        self.change(setup)

    @abstractmethod
    def change(self, setup: Setup) -> None:
        """Change the setup; a strategy that changed nothing raises."""

    # ---- how the planner chooses it ----

    axis: ClassVar[Axis | None] = None
    """What it is an alternative on; without one the planner leaves it to users."""
    permission: ClassVar[str] = ""
    """The word for --allow if its fidelity, with some settings, is below `rounding`; empty: its
    name."""
    asked_first: ClassVar[bool] = False
    """Whether it may replace what the other strategies of its axis would add to."""
    needs_ranks: ClassVar[bool] = False
    """Whether it divides something among several ranks, and one rank has nothing to divide."""
    traced: ClassVar[TracePart] = TracePart.LAYERS
    """Which of the traces behind quick prices it changes."""

    @classmethod
    def options(cls, asked: PlanQuestion, so_far: list[Option]) -> list[Option]:
        """Returns the options of its axis, where those of the strategies before it are `so_far`."""
        made = cls()
        if made.fidelity > Fidelity.ROUNDING and not asked.allows(cls):
            return so_far
        if cls.needs_ranks and asked.workload.ranks == 1:
            return so_far
        if cls.axis is Axis.FREE:
            (free,) = so_far
            return [(*free, made)] if asked.works(*free, made) else so_far
        return [*so_far, *asked.usable([(made,)])]

    def is_pointless(self, beside: Combination) -> bool:  # noqa: ARG002
        """Whether it would have nothing to do beside the others, or something better is offered."""
        return False

    def needs_whole_batches(self, beside: Combination) -> bool:  # noqa: ARG002
        """Whether a step of several micro-batches would be another one."""
        return False

    def tier(self, beside: Combination) -> Tier:  # noqa: ARG002
        """Returns how slow a step is at least."""
        return Tier.USUAL

    @property
    def is_rare(self) -> bool:
        """Whether it is worth a price only if nothing fits without it."""
        return False

    def for_layers(self, count: int | None) -> Self:  # noqa: ARG002
        """Returns the same for so many layers (None: all); itself if it is not for layers."""
        return self

    def as_traced(self) -> Self:
        """Returns the settings with the same trace that stand for all of them."""
        return self

    def traced_inputs(self, config: Any, rows: int) -> dict[str, torch.Tensor] | None:  # noqa: ARG002
        """Returns what a batch holds instead of texts; None: texts."""
        return None

    # ---- what people read ----

    missed_if_exact: ClassVar[bool] = False
    """Whether plans on a card say that --exact forbids it."""
    missed_if_needless: ClassVar[bool] = False
    """Whether plans that do without it say what it would cost."""

    def in_words(self) -> str:
        """Returns what it does with these settings, in a few words."""
        return shown(self.called())

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        """Returns why a plan uses it, as a `Message` with the figures behind it."""
        return Message("used: {name}", name=self.called())

    def also_explain(self, plan: PlanFigures) -> dict[str, str]:  # noqa: ARG002
        """Returns further sentences of a plan that uses it, by what they are about."""
        return {}

    # ---- what the stock Trainer can do of it ----

    is_stock: ClassVar[bool] = False
    """Whether the arguments below are all of it."""

    def stock_arguments(self) -> Mapping[str, Any]:
        """Returns the training arguments that come nearest to it."""
        return {}


def change_arguments(setup: Setup, **fields: Any) -> None:
    """Set these on the run's own arguments, and note how to put them back."""
    before = {name: getattr(setup.args, name) for name in fields}

    def put_back() -> None:
        for name, value in before.items():
            setattr(setup.args, name, value)

    setup.undo.append(put_back)
    for name, value in fields.items():
        setattr(setup.args, name, value)


def is_users(setup: Setup, name: str) -> bool:
    """Whether the user chose this argument; where that is not known, whether it is not the default.

    A value that happens to be the default cannot be told from one that was never given.
    """
    if setup.user_set is not None:
        return name in setup.user_set
    return bool(plain_value(setup, name) != _default(setup, name))


def plain_value(setup: Setup, name: str) -> Any:
    """The argument as the user writes it: enumerations as their text."""
    value = getattr(setup.args, name)
    return getattr(value, "value", value)


def _default(setup: Setup, name: str) -> Any:
    field = next(field for field in dataclasses.fields(setup.args) if field.name == name)
    return getattr(field.default, "value", field.default)
