"""Each decision of a plan and its reason, with the figures behind it.

What a strategy saves and costs is the difference to the same plan without it, by quick prices.
The sentences themselves are in messages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from memfit.planner.batches import batches_of
from memfit.planner.messages import MESSAGES
from memfit.planner.plan import Decision
from memfit.planner.space import Asked
from memfit.planner.values import Candidate, Price, Pricer
from memfit.strategies import (
    Checkpointing,
    Fidelity,
    GradientRelease,
    LowBitAdamW,
    Strategy,
    by_name,
    ordered,
)
from memfit.units import format_seconds

_BYTES_PER_PARAMETER = {24: 5.03, 16: 4.03}
"""Weights and optimizer state of the low-bit optimizer; AdamW in fp32 has 12."""


def gb(count: float) -> str:
    """Decimal units, as budgets are written: 0.61 GB, 43 MB."""
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.0f} MB"


def percent(share: float) -> str:
    """A share for a person: 11 %."""
    return f"{100 * share:.0f} %"


def step_time(seconds: float) -> str:
    """A step's time: 18.4 ms, 1.25 s."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def explain(price: Price, asked: Asked, pricer: Pricer, budget_bytes: int) -> tuple[Decision, ...]:
    """The plan as a whole, what it uses, what of the user's it keeps, what it leaves out."""
    return _Explaining(price, asked, pricer, budget_bytes).decisions()


@dataclass
class _Explaining:
    price: Price
    asked: Asked
    pricer: Pricer
    budget_bytes: int

    def __post_init__(self) -> None:
        self.candidate = self.price.candidate
        self.quick = self.pricer.quick(self.candidate)

    def decisions(self) -> tuple[Decision, ...]:
        """All of them, in the order they are read."""
        found = [self._memory(), self._time(), self._micro_batches()]
        for strategy in self.candidate.strategies:
            found.append(self._used(strategy))
            if isinstance(strategy, LowBitAdamW) and not self.candidate.get("gradient_release"):
                found.append(Decision("gradients.kept", {"bytes": gb(2 * self._learning())}))
        return (*found, *self._yours(), *self._unused())

    # --------------------------------------------------------------- the plan as a whole

    def _memory(self) -> Decision:
        peaks = {name: one.device_bytes for name, one in self.price.phases.items()}
        phase = max(peaks, key=lambda name: peaks[name], default="training")
        peak = self.price.device_bytes
        fields = {
            "peak": gb(peak),
            "budget": gb(self.budget_bytes),
            "share": percent(peak / max(self.budget_bytes, 1)),
            "phase": phase,
        }
        return Decision("memory", fields)

    def _time(self) -> Decision:
        workload = self.asked.workload
        steps, seconds = workload.steps_per_epoch, self.price.step_seconds
        total = (
            workload.args.max_steps
            if workload.args.max_steps > 0
            else steps * workload.args.num_train_epochs
        )
        fields = {
            "step": step_time(seconds),
            "steps": f"{steps:,}",
            "epoch": format_seconds(steps * seconds),
            "total": format_seconds(total * seconds),
        }
        return Decision("time", fields)

    def _micro_batches(self) -> Decision:
        workload, limits = self.asked.workload, self.candidate.micro_batching
        packed = self.candidate.get("packing") is not None
        cut = batches_of(workload, self.candidate.strategies).cut(limits, packed=packed)
        fields = {"rows": f"{workload.effective_rows:,}", "tokens": f"{cut.worst_tokens:,}"}
        if cut.worst_micro_batches == 1:
            return Decision("micro.whole", {**fields, "mean": f"{cut.tokens:,.0f}"})
        parts = {"parts": f"{cut.micro_batches:.1f}", "worst": str(cut.worst_micro_batches)}
        return Decision("micro.split", {**fields, **parts})

    # --------------------------------------------------------------------- what is used

    def _used(self, strategy: Strategy) -> Decision:
        special: dict[str, Callable[[Any], tuple[str, dict[str, str]]]] = {
            "checkpointing": self._recomputed,
            "activation_offload": self._offloaded,
            "lowbit_adamw": self._low_bit,
            "gradient_release": self._released,
            "state_offload": self._state_hosted,
            "optimizer_offload": self._hosted,
            "cuda_graphs": self._graphs,
            "packing": self._packed,
            "truncation": self._truncated,
        }
        if strategy.name in special:
            message, fields = special[strategy.name](strategy)
            return Decision(message, fields, strategy.name)
        fields = {
            name: str(getattr(strategy, name))
            for name in ("dtype", "rule", "rank", "what")
            if hasattr(strategy, name)
        }
        if strategy.name in MESSAGES:
            return Decision(strategy.name, fields, strategy.name)
        return Decision("used", {"name": strategy.name}, strategy.name)

    def _recomputed(self, strategy: Checkpointing) -> tuple[str, dict[str, str]]:
        return f"checkpointing.{strategy.part}", self._layers(strategy)

    def _offloaded(self, strategy: Strategy) -> tuple[str, dict[str, str]]:
        return "activation_offload", self._layers(strategy)

    def _layers(self, strategy: Any) -> dict[str, str]:
        count = self.asked.depth if strategy.layers is None else strategy.layers
        difference = self._difference(self._without(strategy.name))
        return {"count": str(count), "depth": str(self.asked.depth), **difference}

    def _low_bit(self, strategy: LowBitAdamW) -> tuple[str, dict[str, str]]:
        size = _BYTES_PER_PARAMETER[strategy.master_bits]
        fields = {
            "dtype": strategy.dtype,
            "bits": str(strategy.master_bits),
            "bytes": f"{size:.0f}",
            "saved": gb((12 - size) * self._learning()),
        }
        return "lowbit_adamw", fields

    def _released(self, strategy: GradientRelease) -> tuple[str, dict[str, str]]:
        clips = self.asked.workload.args.max_grad_norm or 0
        kept = 1.0 if strategy.mode == "kept8" else 2.0
        fields = {"norm": f"{clips:g}", "saved": gb(kept * self._learning())}
        message = f"gradients.{strategy.mode}"
        if strategy.mode == "kept8" and not clips:
            message = "gradients.kept8.sum"
        if strategy.mode == "release" and strategy.clip == "predicted":
            message = "gradients.release.predicted"
        return message, fields

    def _hosted(self, strategy: Any) -> tuple[str, dict[str, str]]:
        rest = [one for one in self.candidate.strategies if one.name != strategy.name]
        if strategy.dtype is not None:
            rest.append(LowBitAdamW(dtype=strategy.dtype))  # the same weights, the state here
        there = replace(self.candidate, strategies=tuple(ordered(rest)))
        message = "optimizer_offload.weights" if strategy.weights else "optimizer_offload"
        return message, {"host": gb(self.price.host_bytes), **self._difference(there)}

    def _state_hosted(self, strategy: Any) -> tuple[str, dict[str, str]]:
        message = "state_offload.gradients" if strategy.gradients else "state_offload"
        fields = self._difference(self._without(strategy.name))
        return message, {"host": gb(self.price.host_bytes), **fields}

    def _graphs(self, strategy: Strategy) -> tuple[str, dict[str, str]]:
        launched = self.pricer.quick(self._without(strategy.name))
        saved = launched.step_seconds - self.quick.step_seconds
        counts = self.quick.counts
        launches = f"{counts.replayed + counts.launches:,.0f}"
        return "cuda_graphs", {"launches": launches, "saved_time": step_time(max(saved, 0.0))}

    def _packed(self, strategy: Strategy) -> tuple[str, dict[str, str]]:
        share = batches_of(self.asked.workload, self.candidate.strategies).padding_share()
        return strategy.name, {"share": percent(share)}

    def _truncated(self, strategy: Any) -> tuple[str, dict[str, str]]:
        lengths = self.asked.workload.lengths
        cut = sum(length > strategy.max_length for length in lengths) / len(lengths)
        return strategy.name, {"tokens": str(strategy.max_length), "share": percent(cut)}

    # ------------------------------------------------------------------ what is the user's

    def _yours(self) -> Iterator[Decision]:
        workload, args = self.asked.workload, self.asked.workload.args
        if args.gradient_checkpointing:
            yield Decision("yours.checkpointing", {})
        for name in ("bf16", "fp16"):
            if name in workload.user_set or getattr(args, name):
                yield Decision("yours.precision", {"name": f"{name}={getattr(args, name)}"})
        if "optim" in workload.user_set:
            yield Decision("yours.optim", {"name": str(getattr(args.optim, "value", args.optim))})
        if args.torch_compile:
            yield Decision("yours.compile", {})
        if workload.freeze is not None:
            yield Decision("yours.freeze", {"what": workload.freeze})
        if workload.lora is not None:
            yield Decision("yours.lora", {"rank": str(workload.lora)})
        if not workload.stock_loss:
            yield Decision("yours.loss", {})

    # ----------------------------------------------------------------- what is not used

    def _unused(self) -> Iterator[Decision]:
        for name, reason in self.asked.left_out.items():
            if self.candidate.get(name) is None:
                fields = {"name": name, "reason": reason}
                yield Decision("unused.cannot", fields, name)
        if self.asked.exact and self.asked.card is not None:
            for name in ("lowbit_adamw", "half_precision"):
                if by_name(name)().fidelity is not Fidelity.EXACT:
                    yield Decision("unused.exact", {"name": name}, name)
        known = self.asked.left_out
        if not self.candidate.get("checkpointing") and "checkpointing" not in known:
            yield from self._needless(Checkpointing())

    def _needless(self, strategy: Strategy) -> Iterator[Decision]:
        if self.asked.workload.args.gradient_checkpointing:
            return
        with_it = replace(
            self.candidate, strategies=tuple(ordered([*self.candidate.strategies, strategy]))
        )
        slower = self.pricer.quick(with_it).step_seconds / self.quick.step_seconds - 1
        fields = {"name": strategy.name, "cost": percent(max(slower, 0.0))}
        yield Decision("unused.needless", fields, strategy.name)

    # ------------------------------------------------------------------------- figures

    def _without(self, name: str) -> Candidate:
        kept = tuple(one for one in self.candidate.strategies if one.name != name)
        return replace(self.candidate, strategies=kept)

    def _difference(self, other: Candidate) -> dict[str, str]:
        """What this plan saves and costs against the other one."""
        than = self.pricer.quick(other)
        saved = than.device_bytes - self.quick.device_bytes
        cost = 1 - than.step_seconds / self.quick.step_seconds
        return {"saved": gb(max(saved, 0)), "cost": percent(max(cost, 0.0))}

    def _learning(self) -> int:
        return self.pricer.learning_parameters(self.candidate)
