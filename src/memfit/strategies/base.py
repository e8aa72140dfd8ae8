"""What a strategy is: one memory technique, in one file, behind one contract.

A strategy is a small frozen dataclass; its fields are its settings. It says what it does to the
result (`fidelity`), what it shrinks, what it cannot stand beside, why it may be of no use here,
and it changes a `Setup`: the model, or how the step is run. registry.py has the order, planning.py
the words in which the planner and a strategy talk.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import psutil

from memfit.engine.half_on_cpu import half_on_cpu
from memfit.errors import ConfigError
from memfit.i18n import N_, Message, shown
from memfit.memory import device as device_here
from memfit.memory.cards import TRITON_FROM
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


Half = Literal["bfloat16", "float16"]

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
    """One memory technique: what it does to the result, where it works, how it changes a set-up."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """What plans call it, in a few words; its name if empty."""
    reason: ClassVar[str] = ""
    """Why one would want it, in a sentence a user reads."""
    shrinks: ClassVar[tuple[str, ...]] = ()
    """The components of memory it makes smaller; `time` if it makes steps faster."""
    conflicts: ClassVar[frozenset[str]] = frozenset()
    """Names of strategies it cannot stand beside."""

    @property
    @abstractmethod
    def fidelity(self) -> Fidelity:
        """What it does to the result, with these settings."""

    def unavailable(self, setup: Setup) -> str:  # noqa: ARG002
        """Why it has no use here, as a `Message`; empty where it has."""
        return ""

    @abstractmethod
    def change(self, setup: Setup) -> None:
        """Change the setup; a strategy that changed nothing raises."""

    def apply(self, setup: Setup) -> None:
        """Change the setup, or say why that has no use here."""
        if reason := self.unavailable(setup):
            raise ConfigError(CANNOT_BE_USED, strategy=self.name, reason=reason)
        self.change(setup)

    def in_words(self) -> str:
        """Returns what it does with these settings, in a few words."""
        return shown(called(self))

    def explain(self, plan: PlanFigures) -> str:  # noqa: ARG002
        """Returns why a plan uses it, as a `Message` with the figures behind it."""
        return Message("used: {name}", name=called(self))

    def stock_arguments(self) -> Mapping[str, Any]:
        """Returns the training arguments of the stock Trainer that come nearest to it."""
        return {}


def called(strategy: Strategy | type[Strategy]) -> str:
    """Returns what plans call a strategy."""
    return Message(strategy.title) if strategy.title else strategy.name


class PlannedTask(Protocol):
    """What is trained, as far as sentences name it: planner.task.Task."""

    @property
    def args(self) -> TrainingArguments:
        """As the user gave them."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every training row."""

    @property
    def depth(self) -> int:
        """Layers a text passes."""

    @property
    def ranks(self) -> int:
        """Processes that train together."""


class PlanFigures(Protocol):
    """The figures behind a plan, for the sentence a strategy explains itself with."""

    @property
    def task(self) -> PlannedTask:
        """What is trained."""

    @property
    def trainable_parameters(self) -> int:
        """How many parameters are trained."""

    @property
    def host_bytes(self) -> int:
        """What the plan holds in host memory."""

    @property
    def kernels(self) -> float:
        """How many kernels a step runs."""

    def padding_share(self) -> float:
        """How much of every batch would be padding."""

    def saves(self, strategy: Strategy, instead: tuple[Strategy, ...] = ()) -> dict[str, str]:
        """Returns `saved` bytes and `cost` in time against the plan without it, in words."""

    def seconds_saved(self, strategy: Strategy) -> float:
        """Returns by how much a step is faster than without it."""


S = TypeVar("S", bound=Strategy)


def find(strategies: Iterable[Strategy], kind: type[S]) -> S | None:
    """Returns the strategy of this kind; None where there is none."""
    return next((one for one in strategies if isinstance(one, kind)), None)


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
