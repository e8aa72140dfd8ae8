"""A plan: strategies with their settings, their price and their reasons; a file that can be edited.

[strategies]
    packing = {}
    checkpointing = {layers = 9, part = "layer"}

Strategies are written under their registry names with their settings. What is under
[predicted] and [reasons] is for readers: it is not read back, `check` prices a plan anew.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import files
from memfit.config.files import atomic_writer
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, Language, pt, shown, t
from memfit.memory.components import Component
from memfit.memory.memory_line import MemoryLine
from memfit.planner.price import Price, Pricer, fidelity_of
from memfit.planner.task import Task
from memfit.strategies import (
    Checkpointing,
    Fidelity,
    HalfPrecision,
    SmallStateOptimizer,
    Strategy,
    by_name,
    ordered,
)
from memfit.strategies.retired import current_settings
from memfit.units import format_bytes

if TYPE_CHECKING:
    from transformers import TrainingArguments

_VERSION = 1

_STOCK = (HalfPrecision, Checkpointing, SmallStateOptimizer)
"""Strategies that training arguments of the stock Trainer ask for."""

_TABLES = ("run", "workload", "micro_batching", "strategies", "predicted", "reasons")


@dataclass(frozen=True)
class Decision:
    """One decision with the figures behind it; a sentence in either language."""

    about: str
    """What is decided, in a word: the name of its reason in a plan's file."""
    message: str
    """The sentence: a `Message`, or plain text."""
    strategy: str = ""
    """The registry name of what is decided on; empty for the plan as a whole."""

    def sentence(self, language: Language | None = None) -> str:
        """In plain words; in the language spoken here, or another."""
        return shown(self.message, language)


@dataclass(frozen=True, kw_only=True)
class Digest:
    """What a plan was made for: enough to see that it is used for something else."""

    model: str
    rows: int
    effective_rows: int
    longest_tokens: int
    worst_tokens: int
    total_tokens: int
    budget_bytes: int
    card: str
    ranks: int = 1


_DRAWERS: list[Callable[[Any], str]] = []


def draw_plans_with(drawer: Callable[[Any], str]) -> None:
    """Shows plans in notebooks with this; memfit.report.notebook calls it when it is imported."""
    _DRAWERS.append(drawer)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Strategies, micro-batches, and what they cost."""

    strategies: tuple[Strategy, ...]
    micro_batching: MicroBatching
    digest: Digest
    price: Price | None = None
    """None of a plan that was read from a file and not checked."""
    decisions: tuple[Decision, ...] = ()
    args: TrainingArguments | None = field(default=None, repr=False)
    run: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The run's own configuration, by which a plan in a file can be checked again."""
    line: MemoryLine | None = field(default=None, repr=False)
    """The plan's device memory by tokens and layers that are not recomputed, through its traces."""

    @property
    def fidelity(self) -> Fidelity:
        """What it does to the result."""
        return fidelity_of(self.strategies)

    @property
    def context_bytes(self) -> int | None:
        """What the run is expected to hold outside of torch's books; None where not priced."""
        return None if self.price is None else self.price.peak.components[Component.CONTEXT]

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.strategies) or "no strategy"
        words = [f"{self.fidelity}: {names}"]
        if (tokens := self.micro_batching.max_tokens) is not None:
            words.append(f"{tokens:,} tokens at once")
        if self.price is not None:
            seconds = f"{self.price.step_seconds:.3g} s a step"
            words.append(f"{format_bytes(self.price.device_bytes)}, {seconds}")
        return f"<Plan {'; '.join(words)}>"

    def _repr_html_(self) -> str | None:
        return _DRAWERS[-1](self) if _DRAWERS else None

    def sentences(self, language: Language | None = None) -> list[str]:
        """Every decision and its reason."""
        return [one.sentence(language) for one in self.decisions]

    def tables(self) -> dict[str, Any]:
        """What is done, and for what: all that `from_tables` reads, and the fidelity."""
        limits = dataclasses.asdict(self.micro_batching)
        return {
            "version": _VERSION,
            "fidelity": str(self.fidelity),
            "workload": dataclasses.asdict(self.digest),
            "micro_batching": {name: one for name, one in limits.items() if one is not None},
            "strategies": {one.name: settings_of(one) for one in self.strategies},
        }

    def messages(self) -> dict[str, str]:
        """The reasons by the name of their strategy, or of what is decided."""
        return {one.strategy or one.about: one.message for one in self.decisions}

    def to_toml(self, language: Language | None = None) -> str:
        """The plan as a file."""
        tables = {**self.tables(), **({"run": self.run} if self.run else {})}
        if self.price is not None:
            tables["predicted"] = predicted(self.price)
        if self.decisions:
            reasons = {name: shown(one, language) for name, one in self.messages().items()}
            tables["reasons"] = reasons
        return files.dump_toml(tables)

    def write(self, path: str | Path, language: Language | None = None) -> None:
        """Write the file, whole or not at all."""
        with atomic_writer(Path(path)) as file:
            file.write(self.to_toml(language))

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan in a file; what is wrong in it is said with the nearest right name."""
        return cls.from_tables(files.read_toml(Path(path)), str(path))

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], where: str = "the plan") -> Plan:
        """A plan from a file's values."""
        for name in tables:
            known = ("version", "fidelity", *_TABLES)
            if name not in known:
                raise ConfigError(
                    "{where}: unknown table {name}.{hint}",
                    where=where,
                    name=repr(name),
                    hint=nearest(name, known),
                )
        if tables.get("version", _VERSION) != _VERSION:
            raise ConfigError(
                "{where}: version {version} is not known; make a new plan",
                where=where,
                version=tables["version"],
            )
        for name in _TABLES:
            if not isinstance(tables.get(name, {}), Mapping):
                raise ConfigError("{where}: {name} must be a table", where=where, name=name)
        given = tables.get("strategies", {})
        strategies = ordered([_strategy(name, given[name], where) for name in given])
        limits = _made(MicroBatching, tables.get("micro_batching", {}), f"{where}: micro_batching")
        digest = _made(Digest, tables.get("workload", {}), f"{where}: workload")
        return cls(
            strategies=tuple(strategies),
            micro_batching=limits,
            digest=digest,
            run=tables.get("run", {}),
        )

    def training_arguments(self, args: TrainingArguments | None = None) -> TrainingArguments:
        """What of the plan the stock Trainer can do, on top of these or the planned arguments.

        Half precision, recomputation of all layers, accumulation and the small-state optimizer;
        `beyond_stock` names the rest, without which it needs more memory. Set
        `model.accepts_loss_kwargs = False` before the stock Trainer is made: otherwise it does
        not divide by the accumulation steps (transformers#47688).
        """

        base = args if args is not None else self.args
        if base is None:
            raise ConfigError("give the TrainingArguments the plan is to be built on")
        return stock_arguments(copy.copy(base), self)

    @property
    def beyond_stock(self) -> tuple[str, ...]:
        """Strategies of the plan that only BudgetTrainer runs."""

        return tuple(one.name for one in self.strategies if not isinstance(one, _STOCK))

    def as_json(self) -> dict[str, Any]:
        """The plan as the commands print it with --json."""
        shown = {
            "fidelity": str(self.fidelity),
            "strategies": {one.name: settings_of(one) for one in self.strategies},
            "micro_batching": dataclasses.asdict(self.micro_batching),
            "reasons": self.sentences(),
        }
        return shown if self.price is None else {**shown, **predicted(self.price)}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A plan priced anew."""

    plan: Plan
    fits: bool
    missing_bytes: int
    changed: tuple[str, ...]


def check(plan: Plan, task: Task) -> Checked:
    """Traces the plan's whole step for this task."""
    price = Pricer(task).price(plan.strategies, plan.micro_batching)
    now = digest_of(task)
    missing_bytes = max(price.device_bytes - task.budget_bytes, 0)
    return Checked(
        plan=dataclasses.replace(plan, price=price, digest=now, args=task.args),
        fits=missing_bytes == 0,
        missing_bytes=missing_bytes,
        changed=tuple(changes(plan.digest, now)),
    )


def plan_of(price: Price, task: Task, decisions: tuple[Decision, ...] = ()) -> Plan:
    """The plan that these strategies and micro-batches are."""
    return Plan(
        strategies=price.strategies,
        micro_batching=price.micro_batching,
        digest=digest_of(task),
        price=price,
        decisions=decisions,
        args=task.args,
    )


def changes(before: Digest, now: Digest) -> Iterator[str]:
    """What is not as it was when a plan was made: 'rows: 9600 -> 6988'."""
    then = dataclasses.asdict(before)
    for name, value in dataclasses.asdict(now).items():
        if then[name] != value:
            yield f"{name}: {then[name]} -> {value}"


def digest_of(task: Task) -> Digest:
    """What a plan is made for."""
    text: Any = task.config.get_text_config()
    shape = f"{text.num_hidden_layers} layers, {text.hidden_size} wide, {text.vocab_size} tokens"
    return Digest(
        model=f"{task.config.model_type}: {shape}",
        rows=len(task.lengths),
        effective_rows=task.effective_rows,
        longest_tokens=task.longest_tokens,
        worst_tokens=task.worst_tokens,
        total_tokens=sum(task.lengths),
        budget_bytes=task.budget_bytes,
        card="cpu" if task.card is None else task.card.name,
        ranks=task.ranks,
    )


def predicted(price: Price) -> dict[str, Any]:
    """A price under the names `estimate` uses too."""
    peak = price.peak
    return {
        "components": {str(name): peak.components.get(name, 0) for name in Component},
        "peak_allocated_bytes": peak.allocated_bytes,
        "peak_reserved_bytes": peak.reserved_bytes,
        "device_peak_bytes": peak.device_bytes,
        "host_bytes": price.host_bytes,
        "step_seconds": price.step_seconds,
        "traced": True,
        "phases": {name: one.device_bytes for name, one in price.phases.items()},
    }


def settings_of(strategy: Strategy) -> dict[str, Any]:
    """A strategy's settings, without those that are not set."""
    fields = dataclasses.fields(typing.cast(Any, strategy))
    values = {one.name: getattr(strategy, one.name) for one in fields}
    return {name: value for name, value in values.items() if value is not None}


def _strategy(name: str, settings: Any, where: str) -> Strategy:
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "{where}: write {name} = {{}} or {name} = {{setting = value}}",
            where=where,
            name=name,
        )
    where = f"{where}: {name}"
    made: Strategy = _made(by_name(name), current_settings(name, settings, where), where)
    return made


def _made(kind: Any, settings: Mapping[str, Any], where: str) -> Any:
    """A frozen dataclass from a table; a wrong name or type is an error with the right one."""
    fields = {one.name: one for one in dataclasses.fields(kind)}
    for name in settings:
        if name not in fields:
            raise ConfigError(
                "{where} has no setting {name}.{hint}",
                where=where,
                name=repr(name),
                hint=nearest(name, fields),
            )
    required = [one.name for one in fields.values() if one.default is dataclasses.MISSING]
    for name in required:
        if name not in settings:
            raise ConfigError("{where}: {name} is missing", where=where, name=name)
    hints = typing.get_type_hints(kind)
    for name, value in settings.items():
        if not _is_of(value, hints[name]):
            raise ConfigError(
                "{where}: {name} = {value} is not {wanted}",
                where=where,
                name=name,
                value=repr(value),
                wanted=_words(hints[name]),
            )
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    return kind(**values)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a TOML value is of a setting's type."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return any(value == one and type(value) is type(one) for one in choices)
    if origin is tuple:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if choices:  # a union
        return any(_is_of(value, one) for one in choices)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return type(value) is hint


def _words(hint: Any) -> str:
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return functools.reduce(_either, map(repr, choices))
    if origin is tuple:
        return t("a list of names")
    if choices:
        kinds = (_words(one) for one in choices if one is not type(None))
        return functools.reduce(_either, kinds)
    known = {int: N_("a whole number"), float: N_("a number"), bool: N_("true or false")}
    words = known.get(hint, N_("a text"))
    return t(words)


def _either(first: str, last: str) -> str:
    return pt("types", "{first} or {last}", first=first, last=last)


def stock_arguments(args: TrainingArguments, plan: Plan) -> TrainingArguments:
    """Change these arguments to the plan's nearest."""
    for strategy in plan.strategies:
        for name, value in strategy.stock_arguments().items():
            setattr(args, name, value)
    rows = rows_at_once(plan)
    effective = args.per_device_train_batch_size * args.gradient_accumulation_steps
    args.per_device_train_batch_size = rows
    args.gradient_accumulation_steps = effective // rows
    return args


def rows_at_once(plan: Plan) -> int:
    """Rows of one device batch of padded texts: a divisor of a rank's effective batch."""
    limits, digest = plan.micro_batching, plan.digest
    whole = digest.effective_rows // digest.ranks
    most = limits.max_rows or whole
    if limits.max_tokens is not None:
        most = min(most, max(limits.max_tokens // digest.longest_tokens, 1))
    return max(rows for rows in range(1, min(most, whole) + 1) if whole % rows == 0)
