"""What a card can do: which strategies work on it, and which well-known models it can train.

Each cell of the table is the plan that `memfit plan` would make for the usual task: an effective
batch of 32 texts, each of 128 tokens.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from memfit.doctor.environment import Environment
from memfit.errors import MemfitError
from memfit.i18n import shown, t
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.planner.search import Planning
    from memfit.planner.task import Task
    from memfit.strategies import Setup, Strategy

ROWS, TOKENS = 32, 128
"""The effective batch, and the length of every text."""

_STEPS = 100

_NEEDS = {"fused_layers": "triton", "state_offload": "triton", "lora": "peft"}
"""The optional package that a strategy cannot do without."""

_FASTER_WITH_TRITON = ("lowbit_adamw", "gradient_release", "cuda_graphs")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether one strategy can be used here."""

    strategy: str
    fidelity: str
    reason: str = ""
    """Why it cannot be used, in its own words; empty where it can."""
    note: str = ""
    command: str = ""
    """What installs what it lacks, where that is all it lacks."""

    @property
    def ready(self) -> bool:
        """Whether it can be used."""
        return not self.reason


def readiness(found: Environment, card: DeviceProfile | None = None) -> list[Readiness]:
    """Every strategy of the registry, in its order; on `card` where one is given."""
    from memfit.memory.cards import TRITON_FROM
    from memfit.strategies import ORDER

    judged = []
    for kind in ORDER:
        setup = _setup(found, card)
        *beside, strategy = as_used(kind, "float16" if setup.lacks_bf16 else "bfloat16")
        for one in beside:
            if not one.unavailable(setup):
                one.apply(setup)
        reason, note, command = shown(strategy.unavailable(setup)), "", ""
        # Nothing can be installed for a card that is too old for Triton's kernels.
        too_old = setup.device_type == "cuda" and setup.capability < TRITON_FROM
        needed = _NEEDS.get(kind.name, "")
        if reason and needed and not (needed == "triton" and too_old):
            package = found.package(needed)
            command = package.command if package.lacking else ""
        slow = setup.device_type == "cuda" and not setup.has_triton and not too_old
        if slow and not reason and kind.name in _FASTER_WITH_TRITON:
            package = found.package("triton")
            note, command = t("faster with {package}", package=package.name), package.command
        judged.append(Readiness(kind.name, str(strategy.fidelity), reason, note, command))
    return judged


def as_used(kind: type[Strategy], half: Any) -> tuple[Strategy, ...]:
    """A strategy with the usual settings, after those it is used with."""
    from memfit import strategies
    from memfit.config.training_fields import HEAD_LEARNING_RATE

    lowbit = strategies.LowBitAdamW(dtype=half)
    settings: dict[str, Callable[[], tuple[Strategy, ...]]] = {
        "half_precision": lambda: (strategies.HalfPrecision(half),),
        "lowbit_adamw": lambda: (lowbit,),
        "gradient_release": lambda: (lowbit, strategies.GradientRelease("kept8")),
        "state_offload": lambda: (lowbit, kind()),
        "cuda_graphs": lambda: (strategies.Packing(), lowbit, kind()),
        "frozen_features": lambda: (
            strategies.Freezing("encoder", head_learning_rate=HEAD_LEARNING_RATE), kind(),
        ),
        "truncation": lambda: (strategies.Truncation(64),),
    }  # fmt: skip
    return settings.get(kind.name, lambda: (kind(),))()


def _setup(found: Environment, card: DeviceProfile | None) -> Setup:
    """A model of one layer, for which every strategy has something to do."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    from memfit.strategies import Setup

    on_gpu = card is None and found.torch.sees_gpu
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to="none", use_cpu=not on_gpu)
    config: Any = BertConfig(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=64,
        max_position_embeddings=32,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "eager"
    build: Any = BertForSequenceClassification
    device = torch.device("cuda" if on_gpu else "cpu")
    return Setup(model=build(config), args=args, device=device, card=card)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model many people use, by its shape."""

    name: str
    id: str
    model_type: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """The fastest plan of one fidelity, or, where none fits, the smallest."""

    fits: bool
    device_bytes: int
    texts_per_second: float
    strategies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """One model's line of the table."""

    model: KnownModel
    exact: Cell | None = None
    rounding: Cell | None = None
    allowed: Cell | None = None
    """The answer with --allow; only computed if nothing better fits."""
    problem: str = ""
    """Why the model cannot be priced; empty where it can."""


def well_known() -> tuple[KnownModel, ...]:
    """The models of the table, smallest family first."""
    text = resources.files("memfit.doctor").joinpath("well_known.toml").read_text(encoding="utf-8")
    return tuple(
        KnownModel(row["name"], row["id"], row["model_type"], row.get("config", {}))
        for row in tomllib.loads(text)["models"]
    )


def model_config(model: KnownModel) -> Any:
    """Its configuration, without a hub."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model.model_type, **model.config)


def reaches(
    card: DeviceProfile,
    budget_bytes: int,
    *,
    models: Sequence[KnownModel] | None = None,
    plan: Callable[[Task], Planning] | None = None,
) -> Iterator[Reach]:
    """The table, line by line: a line takes some seconds, so each is announced.

    `plan` makes the plan for a task; memfit's planner unless another is given.
    """
    from memfit.config.schema import ALLOWABLE

    every = well_known() if models is None else models
    for number, model in enumerate(every, 1):
        place = {"model": model.name, "number": number, "count": len(every)}
        with doing(t("pricing {model} ({number} of {count}) …", **place)):
            try:
                exact, rounding = (
                    _cell(_task(model, card, budget_bytes, exact=one), plan)
                    for one in (True, False)
                )
                allow = frozenset(ALLOWABLE)
                allowed = None
                if not rounding.fits:
                    allowed = _cell(_task(model, card, budget_bytes, allow=allow), plan)
                reach = Reach(model, exact, rounding, allowed)
            except MemfitError as error:  # a model that cannot be traced does not end the table
                reach = Reach(model, problem=str(error))
        yield reach


def _task(model: KnownModel, card: DeviceProfile, budget_bytes: int, **asked: Any) -> Task:
    from transformers import TrainingArguments

    from memfit.planner.task import Task
    from memfit.units import Budget

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_train_batch_size=ROWS, report_to="none")
    lengths = (TOKENS,) * (ROWS * _STEPS)
    return Task(
        config=model_config(model),
        lengths=lengths,
        args=args,
        card=card,
        budget=Budget(bytes=budget_bytes),
        budget_bytes=budget_bytes,
        **asked,
    )


def _cell(task: Task, plan: Callable[[Task], Planning] | None) -> Cell:
    from memfit.planner.advice import NothingFitsError
    from memfit.planner.search import plan_for

    try:
        chosen, fits = (plan or plan_for)(task).chosen, True
    except NothingFitsError as error:
        chosen, fits = error.smallest, False
    assert chosen.price is not None
    return Cell(
        fits=fits,
        device_bytes=chosen.price.device_bytes,
        texts_per_second=ROWS / chosen.price.step_seconds,
        strategies=tuple(one.name for one in chosen.strategies),
    )
