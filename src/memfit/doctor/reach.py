"""What a card can do: which strategies work on it, and which well-known models it can train.

Each cell is the fastest plan that fits, by quick prices composed from traced layers: what
`memfit plan` would then trace whole. Techniques that are slow for what they save (offload, cut
texts) are only priced where nothing fits without them. The task is the usual one: an effective
batch of 32 texts, each of 128 tokens.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Any

from memfit.doctor.environment import Environment
from memfit.errors import MemfitError
from memfit.i18n import shown, t
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.planner.candidates import Candidate, Price, Pricer, Timed
    from memfit.planner.workload import Workload
    from memfit.strategies import Setup, Strategy


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
    from memfit.strategies import all_strategies, not_loaded

    judged = [_judged(kind, found, card) for kind in all_strategies()]
    return [*judged, *(Readiness(name, "", shown(why)) for name, why in not_loaded().items())]


def _judged(kind: type[Strategy], found: Environment, card: DeviceProfile | None) -> Readiness:
    setup = _setup(found, card)
    *beneath, strategy = kind.as_used("float16" if setup.lacks_bf16 else "bfloat16")
    for one in beneath:
        if not one.unavailable(setup):
            one.apply(setup)
    reason = shown(strategy.unavailable(setup))
    note = command = ""
    if kind.needs_package and reason:
        package = found.package(kind.needs_package)
        too_old = kind.needs_package == "triton" and _is_too_old(setup)
        command = package.command if package.lacking and not too_old else ""
    elif kind.faster_with and not reason and setup.device_type == "cuda":
        package = found.package(kind.faster_with)
        if not setup.has_triton and not _is_too_old(setup):
            note, command = t("faster with {package}", package=package.name), package.command
    return Readiness(kind.name, str(strategy.fidelity), reason, note, command)


def _is_too_old(setup: Setup) -> bool:
    """Whether it is the card that keeps Triton's kernels away, so that nothing can be installed."""
    from memfit.memory.cards import TRITON_FROM

    return setup.device_type == "cuda" and setup.capability < TRITON_FROM


def _setup(found: Environment, card: DeviceProfile | None) -> Setup:
    import torch
    from transformers import TrainingArguments

    from memfit.strategies import Setup

    on_gpu = card is None and found.torch.sees_gpu
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to="none", use_cpu=not on_gpu)
    device = torch.device("cuda" if on_gpu else "cpu")
    return Setup(model=_model(), args=args, device=device, card=card)


def _model() -> Any:
    """One layer that every strategy has something to do for."""
    from transformers import BertConfig, BertForSequenceClassification

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
    return build(config)


ROWS, TOKENS = 32, 128
"""The effective batch, and the length of every text."""

_STEPS = 100

PricerFor = Callable[["Workload", "DeviceProfile"], "Pricer"]


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
    host_bytes_free: int | None = None,
    pricer_for: PricerFor | None = None,
) -> Iterator[Reach]:
    """The table, line by line: a line takes some seconds, so each is announced."""
    every = well_known() if models is None else models
    for number, model in enumerate(every, 1):
        place = {"model": model.name, "number": number, "count": len(every)}
        with doing(t("pricing {model} ({number} of {count}) …", **place)):
            yield _line(model, card, budget_bytes, host_bytes_free, pricer_for)


def _line(
    model: KnownModel,
    card: DeviceProfile,
    budget_bytes: int,
    host_bytes_free: int | None,
    pricer_for: PricerFor | None = None,
) -> Reach:
    from memfit.memory.stock_estimate import no_collection

    row = _Row(_workload(model), card, budget_bytes, host_bytes_free, pricer_for)
    try:
        with no_collection():
            exact, rounding = row.cell(exact=True), row.cell()
            # Rare techniques may be priced for exact plans alone, and be the faster ones.
            if exact.fits and exact.texts_per_second > rounding.texts_per_second:
                rounding = exact
            allowed = None if rounding.fits else row.cell(allow=True)
    except MemfitError as error:  # one model that cannot be traced is no reason to stop
        return Reach(model, problem=str(error))
    return Reach(model, exact, rounding, allowed)


def _workload(model: KnownModel) -> Workload:
    from transformers import TrainingArguments

    from memfit.planner.workload import Workload

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, per_device_train_batch_size=ROWS, report_to="none")
    lengths = (TOKENS,) * (ROWS * _STEPS)
    return Workload(config=model_config(model), lengths=lengths, args=args)


@dataclass(frozen=True)
class _Row:
    """One model on one card; its layers are traced once for all cells."""

    workload: Workload
    card: DeviceProfile
    budget_bytes: int
    host_bytes_free: int | None
    pricer_for: PricerFor | None

    @cached_property
    def pricer(self) -> Pricer:
        if self.pricer_for is not None:
            return self.pricer_for(self.workload, self.card)
        from memfit.planner.pricing.pricer import TracedPricer

        return TracedPricer(self.workload, self.card)

    def cell(self, *, exact: bool = False, allow: bool = False) -> Cell:
        from memfit.planner.search import ask
        from memfit.planner.space import candidates, permissions
        from memfit.strategies import Tier

        allowed = frozenset(permissions()) if allow else frozenset[str]()
        asked, _ = ask(self.workload, self.card, self.pricer, exact=exact, allow=allowed)
        rare: list[Candidate] = []
        usual: list[Candidate] = []
        for candidate in candidates(asked):
            is_rare = any(one.is_rare for one in candidate.strategies)
            (rare if is_rare else usual).append(candidate)
        timed: list[Timed] = []
        best: Price | None = None
        for tier in Tier:
            # Each tier costs traces: not where the best so far is as fast as it can be.
            if best is None or self.pricer.least_seconds(tier, timed) < best.step_seconds:
                ways = [self.pricer.timed(one) for one in usual if one.tier is tier]
                timed += ways
                best = self._fastest(ways, best)
        if best is None:
            best = self._fastest([self.pricer.timed(one) for one in rare])
        if best is not None:
            return self._cell(best, fits=True)
        every = [self.pricer.quick(one) for one in (*usual, *rare)]
        possible = [one for one in every if self._has_host_memory(one)]
        return self._cell(min(possible, key=lambda one: one.device_bytes), fits=False)

    def _cell(self, price: Price, *, fits: bool) -> Cell:
        return Cell(
            fits=fits,
            device_bytes=price.device_bytes,
            texts_per_second=self.workload.effective_rows / price.step_seconds,
            strategies=tuple(one.name for one in price.candidate.strategies),
        )

    def _fastest(self, ways: Iterable[Timed], best: Price | None = None) -> Price | None:
        """The first of these that fits, or what is better already; memory is asked for in turn."""
        from memfit.planner.search import rank, rank_in_time

        for speed, equal in groupby(sorted(ways, key=rank_in_time), key=rank_in_time):
            if best is not None and speed > rank_in_time(best):
                break
            prices = (self.pricer.quick(one.candidate) for one in equal)
            fitting = [one for one in prices if self._fits(one)]
            if fitting:
                return min(fitting if best is None else [best, *fitting], key=rank)
        return best

    def _fits(self, price: Price) -> bool:
        return price.device_bytes <= self.budget_bytes and self._has_host_memory(price)

    def _has_host_memory(self, price: Price) -> bool:
        import psutil

        from memfit.planner.advice import fits_host

        free = self.host_bytes_free
        return fits_host(price, psutil.virtual_memory().available if free is None else free)
