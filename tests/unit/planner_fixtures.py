"""A task, and prices by simple formulas, for tests of how the planner chooses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from transformers import BertConfig, TrainingArguments

from memfit.memory.cards import DeviceProfile, find_card
from memfit.memory.components import Component, MemoryPeak
from memfit.memory.tracing.counting import StepCounts
from memfit.planner.candidates import Candidate, PlanTask, Price, Timed
from memfit.planner.pricing.shallow_traces import Known
from memfit.planner.ranks import RankCost, rank_cost
from memfit.planner.search import Planning, make_plan
from memfit.planner.workload import Workload, batches_of
from memfit.strategies import Strategy, Tier
from memfit.units import Budget

DEPTH, WIDTH, VOCABULARY = 24, 1024, 21128
"""BERT-Large with the Chinese vocabulary."""


def bert(layers: int = DEPTH, width: int = WIDTH, vocabulary: int = VOCABULARY) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        intermediate_size=4 * width,
    )


def lengths_like_reviews(rows: int = 6988, longest: int = 128) -> tuple[int, ...]:
    """A mean of about 85 tokens, a fifth of the rows cut at the longest."""
    draw = random.Random(1)
    return tuple(min(max(8, round(draw.lognormvariate(4.4, 0.55))), longest) for _ in range(rows))


def task(
    config: Any = None,
    *,
    lengths: tuple[int, ...] | None = None,
    user_set: frozenset[str] = frozenset(),
    **arguments: Any,
) -> Workload:
    given = {
        "per_device_train_batch_size": 32,
        "report_to": "none",
        "use_cpu": True,
        **arguments,
    }
    return Workload(
        config=config or bert(),
        lengths=lengths or lengths_like_reviews(),
        args=TrainingArguments("unused", **given),
        user_set=user_set,
    )


BERT_LARGE = task()
"""For tests that need no task of their own: they share what was priced for it."""


def to_plan(
    workload: Workload, budget_bytes: int, card: DeviceProfile | None, **asked: Any
) -> PlanTask:
    return PlanTask(
        workload=workload,
        card=card,
        budget=Budget(bytes=budget_bytes),
        budget_bytes=budget_bytes,
        **asked,
    )


def planned(
    workload: Workload,
    budget_bytes: int,
    card: DeviceProfile | None,
    *,
    exact: bool = False,
    allow: frozenset[str] = frozenset(),
    **found: Any,
) -> Planning:
    return make_plan(to_plan(workload, budget_bytes, card, exact=exact, allow=allow), **found)


def h200() -> DeviceProfile:
    return find_card("H200")


class FormulaPricer:
    """Memory and time of a BERT by rules of thumb; a trace differs from them by up to `off`."""

    def __init__(
        self,
        workload: Workload,
        card: DeviceProfile | None,
        *,
        off: float = 0.0,
        packs: bool = True,
        host_is_fast: bool = False,
    ) -> None:
        self.workload, self.card, self.off = workload, card, off
        self.host_is_fast = host_is_fast
        self.packs = packs
        self.prices: dict[Candidate, Price] = {}
        self.known = Known()
        self._of: dict[str, FormulaPricer] = {}
        config: Any = workload.config
        self.layers, self.width = config.num_hidden_layers, config.hidden_size
        self.layer_parameters = 12 * self.width**2
        self.outside = config.vocab_size * self.width

    def problem(self, strategies: tuple[Strategy, ...]) -> str:
        names = {one.name for one in strategies}
        args = self.workload.args
        if "packing" in names and not self.packs:
            return "this model cannot be packed"
        if "cuda_graphs" in names and not self.workload.stock_loss:
            return "a loss that is not the model's own cannot be captured unseen"
        if names & {"lowbit_adamw", "half_precision"} and (args.bf16 or args.fp16):
            return "the precision is set already"
        return ""

    def learning_parameters(self, candidate: Candidate) -> int:
        total = self.outside + self.layers * self.layer_parameters
        return total // 100 if candidate.fidelity >= 3 else total

    def exchange(self, candidate: Candidate) -> RankCost:
        return rank_cost(
            self.workload, self.card, 2.0 * self.learning_parameters(candidate), 0.0,
            micro_batches=1.0, divided=False,
        )  # fmt: skip

    def least_seconds(self, tier: Tier, prices: Sequence[Price | Timed]) -> float:
        del tier, prices
        return 0.0

    def of(self, workload: Workload) -> FormulaPricer:
        assert workload.lengths is self.workload.lengths, "only the model may be another"
        key = workload.config.to_json_string()
        if key not in self._of:
            self._of[key] = FormulaPricer(workload, self.card, off=self.off, packs=self.packs)
        return self._of[key]

    def timed(self, candidate: Candidate) -> Timed:
        return Timed(candidate, self.quick(candidate).step_seconds)

    def quick(self, candidate: Candidate) -> Price:
        price = self.prices.get(candidate)
        if price is None:
            price = self.prices[candidate] = self._price(candidate, 1.0)
        return price

    def full(self, candidate: Candidate, budget_bytes: int | None = None) -> Price:
        del budget_bytes
        noise = random.Random(repr(candidate)).uniform(-self.off, self.off)
        price = self._price(candidate, 1 + noise)
        return dataclasses.replace(price, traced=True)

    def _price(self, candidate: Candidate, factor: float) -> Price:
        parts, host = self._memory(candidate)
        parts = {name: round(size * factor) for name, size in parts.items()}
        allocated = sum(parts.values())
        context = 0 if self.card is None else self.card.context_bytes
        peak = MemoryPeak(
            components={**parts, Component.CONTEXT: context},
            allocated_bytes=allocated,
            reserved_bytes=allocated,
            device_bytes=allocated + context,
        )
        return Price(
            candidate=candidate,
            peak=peak,
            phases={"training": peak},
            counts=StepCounts(launches=4000.0),
            step_seconds=self._seconds(candidate),
            host_bytes=host,
        )

    def _memory(self, candidate: Candidate) -> tuple[dict[Component, int], int]:
        learning = self.learning_parameters(candidate)
        total = self.outside + self.layers * self.layer_parameters
        weight, state, gradient, host = 4, 8, 4, 0
        if low := candidate.get("lowbit_adamw"):
            weight, state, gradient = 2, 3 if low.master_bits == 24 else 2, 2
            if release := candidate.get("gradient_release"):
                gradient = 1 if release.mode == "kept8" else 0
                host = 2 * learning if release.mode == "host" else 0
        if offload := candidate.get("optimizer_offload"):
            weight, state, gradient = 2 if offload.dtype else 4, 0, 0
            host = 16 * learning
            if offload.weights:
                host += weight * total
                total = self.outside + 2 * self.layer_parameters
        if candidate.get("small_state_optimizer"):
            state = 0
        kept = self._kept_bytes(candidate)
        parts = {
            Component.WEIGHTS: weight * total,
            Component.OPTIMIZER: state * learning,
            Component.GRADIENTS: gradient * learning,
            Component.ACTIVATIONS: round(kept),
            Component.WORKSPACE: 2**24,
        }
        return parts, host

    def _kept_bytes(self, candidate: Candidate) -> float:
        packed = candidate.get("packing") is not None
        batches = batches_of(self.workload, candidate.strategies)
        tokens = batches.cut(candidate.micro_batching, packed=packed).worst_tokens
        each = 24 if candidate.get("fused_layers") else 34
        size = 1.0 if candidate.get("lowbit_adamw") or candidate.get("half_precision") else 2.0
        again = candidate.get("checkpointing")
        count = 0 if again is None else (again.layers or self.layers)
        saved = 0.0 if again is None else 22 / 24
        away = candidate.get("activation_offload")
        gone = 0 if away is None else (away.layers or self.layers)
        whole = self.layers - count * saved - gone * (1 - saved) * 0.9
        return size * each * self.width * tokens * (max(whole, 0.0) + 1)

    def _seconds(self, candidate: Candidate) -> float:
        packed = candidate.get("packing") is not None
        batches = batches_of(self.workload, candidate.strategies)
        cut = batches.cut(candidate.micro_batching, packed=packed)
        again = candidate.get("checkpointing")
        count = 0 if again is None else (again.layers or self.layers)
        share = 0.0 if again is None else 1 / 3
        work = 1 + share * count / self.layers
        release = candidate.get("gradient_release")
        half = candidate.get("lowbit_adamw") or candidate.get("half_precision")
        half = half or getattr(candidate.get("optimizer_offload"), "dtype", None)
        rate = 4e14 if half else 5e13
        device = 6 * self.layers * self.layer_parameters * cut.tokens * work / rate
        # Every micro-batch reads all weights three times and adds its gradients up.
        device += cut.micro_batches * work * 8 * self.layers * self.layer_parameters / 4e12
        learning = self.learning_parameters(candidate)
        device += learning * (14 if release is None else 16) / 4e12
        launch = 0.0 if candidate.get("cuda_graphs") else 0.08 * cut.micro_batches * work
        bus = 0.0
        if candidate.get("activation_offload"):
            bus += 0.05
        if release is not None and release.mode == "host":
            if self.host_is_fast:
                return 0.5 * device
            bus += 4 * learning / 4e10
        host = 0.0
        if offload := candidate.get("optimizer_offload"):
            host = learning / 0.6e9
            bus += (12 if offload.weights else 4) * learning / 4e10
        return max(device, launch, bus) + host


_pricers: dict[tuple[int, str], FormulaPricer] = {}


def pricer_of(workload: Workload, card: DeviceProfile | None) -> FormulaPricer:
    """One for all tests of a task: what it has priced once it knows."""
    key = (id(workload), "" if card is None else card.name)  # the pricer keeps the workload
    return _pricers.setdefault(key, FormulaPricer(workload, card))
