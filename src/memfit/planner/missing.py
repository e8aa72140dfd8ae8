"""Nothing fits: the smallest plan there is, what is missing, and what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memfit.errors import DoesNotFitError
from memfit.memory.components import COMPONENT_NAMES
from memfit.messages import N_, Language, Message, speaking, t
from memfit.planner.alternatives import reaches, smaller_models
from memfit.planner.explain import explain, gb
from memfit.planner.plan import Decision, Plan, digest_of
from memfit.planner.preflight import fits_host
from memfit.planner.space import Asked, candidates
from memfit.planner.values import Price, Pricer

_SHORTER = (64, 32)
_HELPS = {
    "budget": N_("--budget {bytes} or more"),
    "allow": N_("--allow {permission} reaches {bytes}"),
    "inexact": N_("without --exact it takes {bytes}"),
    "length": N_("--max-length {tokens} takes {bytes}"),
    "model": N_("a model of {layers} layers, {width} wide, takes {bytes}"),
}


@dataclass(frozen=True)
class Help:
    """One thing that would help, and what it would come down to."""

    kind: str
    """budget, allow, inexact, length or model."""
    value: str
    device_bytes: int
    decision: Decision


class NothingFitsError(DoesNotFitError):
    """No plan stays inside the budget."""

    def __init__(self, smallest: Plan, missing_bytes: int, helps: Sequence[Help]) -> None:
        self.smallest = smallest
        self.budget_bytes = smallest.digest.budget_bytes
        self.missing_bytes = missing_bytes
        self.helps = tuple(helps)
        super().__init__(self.text())

    def text(self, language: Language | None = None) -> str:
        """What is missing and what would help."""
        with speaking(language):
            helps = [one.decision.sentence() for one in self.helps]
            return t("; ").join([self._missing(), *helps])

    def _missing(self) -> str:
        price = self.smallest.price
        assert price is not None
        parts = sorted(price.peak.components.items(), key=lambda item: -item[1])[:3]
        return t(
            "nothing fits {budget}: the smallest plan found needs {needs} ({parts}), "
            "so {missing} are missing",
            budget=gb(self.budget_bytes),
            needs=gb(price.device_bytes),
            parts=t(", ").join(
                f"{t(COMPONENT_NAMES[name])} {gb(size)}" for name, size in parts if size
            ),
            missing=gb(self.missing_bytes),
        )


def does_not_fit(
    asked: Asked, pricer: Pricer, prices: Sequence[Price], budget_bytes: int, host_free: int
) -> NothingFitsError:
    """The error for a budget nothing fits."""
    possible = [one for one in prices if fits_host(one, host_free)]
    least = min(possible, key=lambda one: (one.device_bytes, one.step_seconds))
    price = pricer.full(least.candidate)
    missing_bytes = max(price.device_bytes - budget_bytes, 1)
    smallest = Plan(
        candidate=price.candidate,
        price=price,
        digest=digest_of(asked.workload, budget_bytes, asked.card),
        decisions=explain(price, asked, pricer, budget_bytes),
        args=asked.workload.args,
    )
    helps = list(_helps(asked, pricer, price, budget_bytes))
    return NothingFitsError(smallest, missing_bytes, helps)


def _helps(asked: Asked, pricer: Pricer, price: Price, budget_bytes: int) -> Iterator[Help]:
    needs = -(-price.device_bytes // 10**8) * 10**8
    yield _help("budget", gb(needs), needs, bytes=gb(needs))
    below = price.device_bytes
    if asked.exact:
        wider = dataclasses.replace(asked, exact=False, left_out={})
        least = min(pricer.quick(one).device_bytes for one in candidates(wider))
        if least < below:
            yield _help("inexact", "", least, bytes=gb(least))
    for reach in reaches(asked, pricer, budget_bytes):
        size = reach.smallest.device_bytes
        if size < below:
            yield _help("allow", reach.name, size, permission=reach.name, bytes=gb(size))
    yield from _shorter(asked, pricer, below)
    for model in smaller_models(asked, pricer, budget_bytes):
        size = model.price.device_bytes
        if size < below:
            shape = {"layers": str(model.layers), "width": str(model.width)}
            yield _help("model", f"{model.layers}x{model.width}", size, bytes=gb(size), **shape)


def _shorter(asked: Asked, pricer: Pricer, below: int) -> Iterator[Help]:
    from memfit.strategies import Truncation

    for tokens in _SHORTER:
        if tokens >= asked.workload.longest_tokens:
            continue
        cut = dataclasses.replace(asked, left_out={})
        sizes = [
            pricer.quick(one).device_bytes for one in candidates(cut, also=(Truncation(tokens),))
        ]
        if sizes and min(sizes) < below:
            size = min(sizes)
            yield _help("length", str(tokens), size, tokens=str(tokens), bytes=gb(size))
            return


def _help(kind: str, value: str, device_bytes: int, **fields: str) -> Help:
    said = Message(_HELPS[kind], **fields)
    return Help(kind, value, device_bytes, Decision(f"helps.{kind}", said))
