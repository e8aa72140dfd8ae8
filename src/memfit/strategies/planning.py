"""What strategies and the planner tell each other.

A strategy says on which axis of the planner's space it lies, what it does to a step (`Effects`),
how slow it is at least (`Tier`) and which trace it needs (`TracePart`). The planner asks it with a
`PlanQuestion` for the options it offers, and with `PlanFigures` for the sentence in a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from memfit.memory.cards import DeviceProfile
    from memfit.strategies.base import Strategy

Option = tuple["Strategy", ...]
"""One alternative on an axis; the empty one is the plain step."""

Half = Literal["bfloat16", "float16"]


class Axis(Enum):
    """The planner's questions; a candidate has one answer to each."""

    LEARNING = "learning"
    """Which weights learn?"""
    TEXTS = "texts"
    """How long may texts be?"""
    UPDATING = "updating"
    """In which precision is computed, and how are weights stored and stepped?"""
    KEEPING = "keeping"
    """What do layers keep for backward, recompute, or leave in host memory?"""
    LAUNCHING = "launching"
    """Are kernels launched one by one, or replayed?"""
    WORKSPACE = "workspace"
    """Do the matrix libraries get scratch memory as usual, or little?"""
    OWN = "own"
    """Is this strategy used? Beside any answer to the other questions."""
    FREE = "free"
    """No question: it costs neither time nor fidelity and is used wherever it can be."""


class Tier(IntEnum):
    """Kinds of candidates by what a step takes at least, fastest first.

    The slower ones are priced only if they could be faster than what fits already, because each
    needs traces. planner/step_time.py has the least time of each.
    """

    USUAL = 0
    RECOMPUTED = 1
    """Layers are computed again: no faster than the usual."""
    TWO_PASS = 2
    """Backward runs twice."""
    GRADIENTS_ON_HOST = 3
    """Gradients cross the bus, and the step is not captured."""
    STATE_ON_HOST = 4
    """The card reads and writes optimizer state across the bus."""
    OFFLOADED = 5
    """Activations cross the bus, and the step is not captured."""
    UPDATED_ON_HOST = 6
    """The CPU updates the weights."""
    WEIGHTS_ON_HOST = 7
    """Layers' weights cross the bus in every micro-batch as well."""
    RECOMPUTED_AND_OFFLOADED = 8
    WEIGHTS_DIVIDED = 9
    """Ranks send each other all weights twice in every micro-batch, and nothing is captured."""


class TracePart(Enum):
    """Which of the shallow traces that quick prices are composed from changes with a strategy."""

    LAYERS = "layers"
    """What layers do: every combination of such strategies is traced by itself. Always right."""
    UPDATE = "update"
    """How weights are stored and stepped: traced beside one kind of layers."""
    ACTIVATIONS = "activations"
    """What layers keep for backward: traced for all layers, priced for any number of them."""
    NONE = "none"
    """None of them: its `Effects` say what it changes."""


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What a strategy does to a step, as far as others must know it."""

    packs: bool = False
    """Micro-batches have no padding."""
    cuts_at: int | None = None
    """The most tokens that texts keep."""
    few_learn: bool = False
    """Few weights learn, so gradients and optimizer state are small."""
    chooses_weights: bool = False
    """It only chooses which weights learn: traces apply it to a model that has none yet."""
    frozen_layers: int = 0
    """How many of the first layers do not learn."""
    keeps_nothing: bool = False
    """Layers keep no activations."""
    feature_tokens: int = 0
    """Tokens at a time that go through a frozen encoder, once."""
    recomputes: bool = False
    """Layers are computed again in backward."""
    layers: int | None = None
    """How many of the first learning layers it is for; None: all, or not by layers."""
    autocast: Half | None = None
    """Layers compute in this type over float32 weights."""
    stores: Half | None = None
    """Weights are stored in this type."""
    short_masters: bool = False
    """Updates are rounded to 16 bits: preferred only if they are much faster."""
    state_bytes: int = 0
    """Low-bit optimizer state of each parameter."""
    takes_gradients: bool = False
    """No gradient stays in `.grad` until the update."""
    passes: int = 1
    """How often a micro-batch runs in a step."""
    state_on_host: bool = False
    gradients_on_host: bool = False
    updates_on_host: bool = False
    weights_on_host: bool = False
    copies: bool = False
    """Whether it copies to the host on a separate stream."""
    wraps_layers: bool = False
    """Layers are called through it, so recomputation cannot be added around them later."""
    divides_weights: bool = False
    """Each rank keeps a part of every weight, gradient and moment; layers gather what they need."""
    graph_bucket_tokens: int = 0
    """The step is captured in CUDA graphs, whose batches are filled up to a multiple of this."""
    small_workspaces: bool = False


@dataclass(frozen=True)
class Combination:
    """Strategies used together."""

    strategies: Option
    offered: frozenset[Strategy] = frozenset()
    """Everything that other candidates for the same task may use."""
    ranks: int = 1
    """Processes that train together."""

    @cached_property
    def _by_name(self) -> dict[str, Strategy]:
        return {one.name: one for one in self.strategies}

    def get(self, name: str) -> Any:
        """Returns the strategy of that name, or None."""
        return self._by_name.get(name)

    @cached_property
    def effects(self) -> Effects:
        """What they do together: of each effect, what the first strategy that has it says."""
        return _effects_of(self.strategies)


@lru_cache(maxsize=2**14)
def _effects_of(strategies: Option) -> Effects:
    found: dict[str, Any] = {}
    for one in reversed(strategies):
        found.update(_changed(one))
    return Effects(**found)


@lru_cache(maxsize=2**10)
def _changed(strategy: Strategy) -> Mapping[str, Any]:
    """Its effects, without those that a plain step has too."""
    effects = vars(strategy.effects)
    return {name: value for name, value in effects.items() if value != _PLAIN[name]}


_PLAIN: Mapping[str, Any] = {one.name: one.default for one in dataclasses.fields(Effects)}


class TrainingTask(Protocol):
    """What is to be trained: planner.candidates.Workload."""

    @property
    def config(self) -> Any:
        """The model's configuration."""

    @property
    def args(self) -> TrainingArguments:
        """As the user gave them."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every training row."""

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest row."""

    @property
    def freeze(self) -> str | None:
        """What the user froze: encoder, embeddings, or a number of layers."""

    @property
    def lora(self) -> int | None:
        """The rank of the user's own adapters."""

    @property
    def ranks(self) -> int:
        """Processes that train together."""

    @property
    def skips_bad_steps(self) -> bool:
        """Whether a step whose gradient is not finite must leave the weights as they are."""


class PlanQuestion(Protocol):
    """A task on a card, and what the user allows: planner.space.PlanRequest."""

    @property
    def workload(self) -> TrainingTask:
        """What is to be trained."""

    @property
    def card(self) -> DeviceProfile | None:
        """The card; None is the CPU, and every device that is planned for like one."""

    @property
    def kind(self) -> str:
        """The kind of the device, see memory/device.py."""

    @property
    def exact(self) -> bool:
        """Whether only exact strategies are wanted."""

    @property
    def left_out(self) -> dict[str, str]:
        """Why each unusable strategy cannot be used here."""

    @property
    def depth(self) -> int:
        """Layers a text passes."""

    @property
    def half(self) -> Half:
        """The half precision this device computes in."""

    @property
    def refuses_half(self) -> bool:
        """Whether the user said no to that precision."""

    def allows(self, kind: type[Strategy]) -> bool:
        """Whether the user gave the permission this strategy needs."""

    def given(self, name: str) -> bool:
        """Whether the user set this training argument."""

    def judge(self, strategies: Option) -> str:
        """Returns why these cannot be used; empty if they can."""

    def works(self, *strategies: Strategy) -> bool:
        """Whether these can be used; if not, the plan says so of the last one."""

    def usable(self, options: Iterable[Option], beside: Option = ()) -> list[Option]:
        """Returns those of the options that can be used beside these strategies."""


def widened(options: Sequence[Option], more: Callable[[Option], Iterable[Option]]) -> list[Option]:
    """Returns the options, each followed by what can be made of it."""
    return [one for option in options for one in (option, *more(option))]


class PlanFigures(Protocol):
    """The figures behind a plan, for the sentence a strategy explains itself with."""

    @property
    def workload(self) -> TrainingTask:
        """What is trained."""

    @property
    def effects(self) -> Effects:
        """What the plan's strategies do together."""

    @property
    def depth(self) -> int:
        """Layers a text passes."""

    @property
    def learning_parameters(self) -> int:
        """How many parameters learn."""

    @property
    def host_bytes(self) -> int:
        """What the plan keeps in host memory."""

    @property
    def kernels(self) -> float:
        """How many kernels a step runs."""

    def padding_share(self) -> float:
        """How much of every batch would be padding."""

    def saves(self, strategy: Strategy, instead: Option = ()) -> dict[str, str]:
        """Returns `saved` bytes and `cost` in time against the plan without it, in words."""

    def seconds_saved(self, strategy: Strategy) -> float:
        """Returns by how much a step is faster than without it."""
