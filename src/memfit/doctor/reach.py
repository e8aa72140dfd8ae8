"""What a card can train: well-known models against what the result may pay for it.

Each cell is the fastest plan that fits, by quick prices composed from traced layers: what
`memfit plan` would then trace whole. The task is the usual one: an effective batch of 32 texts,
each of 128 tokens.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.memory.cards import DeviceProfile
    from memfit.planner.values import Price, Pricer, Workload

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
    exact: Cell
    rounding: Cell
    allowed: Cell | None
    """With --allow; only asked where nothing better fits."""


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
    """The table, line by line: a line takes a moment."""
    for model in well_known() if models is None else models:
        workload = _workload(model)
        row = _Row(workload, card, budget_bytes, host_bytes_free, pricer_for)
        exact, rounding = row.cell(exact=True), row.cell()
        yield Reach(model, exact, rounding, None if rounding.fits else row.cell(allow=True))


def _workload(model: KnownModel) -> Workload:
    from transformers import TrainingArguments

    from memfit.planner.values import Workload

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
        from memfit.planner.compose import TracedPricer

        return TracedPricer(self.workload, self.card)

    def cell(self, *, exact: bool = False, allow: bool = False) -> Cell:
        from memfit.planner.search import ask, price_all
        from memfit.planner.space import ALLOWABLE

        allowed = frozenset(ALLOWABLE) if allow else frozenset[str]()
        asked, pricer = ask(self.workload, self.card, self.pricer, exact=exact, allow=allowed)
        prices = [one for one in price_all(asked, pricer) if self._has_host_memory(one)]
        fitting = [one for one in prices if one.device_bytes <= self.budget_bytes]
        # price_all puts the fastest first.
        best = fitting[0] if fitting else min(prices, key=lambda one: one.device_bytes)
        return Cell(
            fits=bool(fitting),
            device_bytes=best.device_bytes,
            texts_per_second=self.workload.effective_rows / best.step_seconds,
            strategies=tuple(one.name for one in best.candidate.strategies),
        )

    def _has_host_memory(self, price: Price) -> bool:
        import psutil

        from memfit.planner.preflight import fits_host

        free = self.host_bytes_free
        return fits_host(price, psutil.virtual_memory().available if free is None else free)
