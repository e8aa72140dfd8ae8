"""Each decision of a plan and its reason, with the figures behind it.

A strategy explains itself; this module has the figures. What a strategy saves and costs is the
difference to the same plan without it, by quick prices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memfit.i18n import NP_, Message
from memfit.planner.candidates import Price, Pricer
from memfit.planner.plans import Decision
from memfit.planner.ranks import RankCost, link_bytes_per_second
from memfit.planner.space import PlanRequest
from memfit.planner.workload import Workload, batches_of
from memfit.strategies import ORDER, Effects, Option, Strategy, called, ordered
from memfit.units import duration, gb, percent, step_time

_PHASES = {
    "training": NP_("while", "training"),
    "evaluation": NP_("while", "evaluating"),
    "saving": NP_("while", "saving"),
    "resuming": NP_("while", "resuming"),
}


def _exchanged(cost: RankCost) -> str:
    sent = gb(cost.sent_bytes)
    if not cost.gathered_bytes:
        return Message("sum {sent} of gradients", sent=sent)
    return Message(
        "sum {sent} of gradients and gather {weights} of weights",
        sent=sent,
        weights=gb(cost.gathered_bytes),
    )


def explain(
    price: Price, asked: PlanRequest, pricer: Pricer, budget_bytes: int
) -> tuple[Decision, ...]:
    """The plan as a whole, what it uses, what of the user's it keeps, what it leaves out."""
    return _Explaining(price, asked, pricer, budget_bytes).decisions()


@dataclass
class _Explaining:
    price: Price
    asked: PlanRequest
    pricer: Pricer
    budget_bytes: int

    def __post_init__(self) -> None:
        self.candidate = self.price.candidate
        self.quick = self.pricer.quick(self.candidate)

    def decisions(self) -> tuple[Decision, ...]:
        """All of them, in the order they are read."""
        found = [self._memory(), self._time(), *self._ranks(), self._micro_batches()]
        for strategy in self.candidate.strategies:
            found.append(Decision(strategy.name, strategy.explain(self), strategy.name))
            more = strategy.also_explain(self)
            found += [Decision(about, said) for about, said in more.items()]
        return (*found, *self._yours(), *self._unused())

    # --------------------------------------------------------------- the plan as a whole

    def _memory(self) -> Decision:
        peaks = {name: one.device_bytes for name, one in self.price.phases.items()}
        phase = max(peaks, key=lambda name: peaks[name], default="training")
        peak = self.price.device_bytes
        said = Message(
            "peaks at {peak} of {budget} ({share}), while {phase}",
            peak=gb(peak),
            budget=gb(self.budget_bytes),
            share=percent(peak / max(self.budget_bytes, 1)),
            phase=Message(_PHASES[phase]) if phase in _PHASES else phase,
        )
        return Decision("memory", said)

    def _time(self) -> Decision:
        workload = self.asked.workload
        steps, seconds = workload.steps_per_epoch, self.price.step_seconds
        total = (
            workload.args.max_steps
            if workload.args.max_steps > 0
            else steps * workload.args.num_train_epochs
        )
        said = Message(
            "a step takes {step}, an epoch of {steps} steps {epoch}, the whole run {total}",
            step=step_time(seconds),
            steps=f"{steps:,}",
            epoch=duration(steps * seconds),
            total=duration(total * seconds),
        )
        return Decision("time", said)

    def _ranks(self) -> Iterator[Decision]:
        workload = self.asked.workload
        if workload.ranks == 1:
            return
        cost = self.pricer.exchange(self.candidate)
        fields = {
            "ranks": str(workload.ranks),
            "rows": f"{workload.rank_rows:,}",
            "every": f"{workload.effective_rows:,}",
            "exchange": _exchanged(cost),
            "rate": gb(link_bytes_per_second(self.asked.card)),
            "seconds": step_time(cost.seconds),
            "waited": step_time(cost.waited_seconds),
        }
        if not cost.nccl_bytes:
            said = Message(
                "all figures are of one of {ranks} processes, each with {rows} of a step's {every} "
                "rows; they {exchange} at {rate} a second, which takes {seconds}, of which a step "
                "waits {waited}",
                **fields,
            )
        else:
            said = Message(
                "all figures are of one of {ranks} cards, each with {rows} of a step's {every} "
                "rows; NCCL holds {nccl} of it, and they {exchange} at {rate} a second, which "
                "takes {seconds}, of which a step waits {waited}",
                nccl=gb(cost.nccl_bytes),
                **fields,
            )
        yield Decision("ranks", said)

    def _micro_batches(self) -> Decision:
        workload, limits = self.asked.workload, self.candidate.micro_batching
        packed = self.candidate.effects.packs
        cut = batches_of(workload, self.candidate.strategies).cut(limits, packed=packed)
        fields = {"rows": f"{workload.rank_rows:,}", "tokens": f"{cut.worst_tokens:,}"}
        if cut.worst_micro_batches == 1:
            return Decision(
                "micro.whole",
                Message(
                    "the whole effective batch of {rows} rows runs at once: {tokens} tokens "
                    "at most, {mean} on average",
                    mean=f"{cut.tokens:,.0f}",
                    **fields,
                ),
            )
        said = Message(
            "at most {tokens} tokens are on the device at once: {parts} "
            "micro-batches a step of {rows} rows on average, {worst} for the longest "
            "texts",
            parts=f"{cut.micro_batches:.1f}",
            worst=str(cut.worst_micro_batches),
            **fields,
        )
        return Decision("micro.split", said)

    # ------------------------------------------------------------------ what is the user's

    def _yours(self) -> Iterator[Decision]:
        workload, args = self.asked.workload, self.asked.workload.args
        if args.gradient_checkpointing:
            yield Decision(
                "yours.checkpointing",
                Message("gradient_checkpointing is yours and stays: every layer is recomputed"),
            )
        for name in ("bf16", "fp16"):
            if name in workload.user_set or getattr(args, name):
                yield Decision(
                    "yours.precision",
                    Message("{name} is yours and stays", name=f"{name}={getattr(args, name)}"),
                )
        if "optim" in workload.user_set:
            chosen = str(getattr(args.optim, "value", args.optim))
            yield Decision(
                "yours.optim", Message("the optimizer {name} is yours and stays", name=chosen)
            )
        if args.torch_compile:
            yield Decision(
                "yours.compile",
                Message("torch_compile is yours and stays; it wants the same shapes in every step"),
            )
        if workload.freeze is not None:
            yield Decision("yours.freeze", Message("frozen by you: {what}", what=workload.freeze))
        if workload.lora is not None:
            yield Decision(
                "yours.lora",
                Message("your LoRA adapters of rank {rank} stay", rank=str(workload.lora)),
            )
        if workload.weighted_loss:
            said = Message("the loss is weighted by class, as --class-weights says")
            yield Decision("yours.class_weights", said)
        elif args.label_smoothing_factor:
            said = Message("the loss is smoothed, as --label-smoothing-factor says")
            yield Decision("yours.smoothing", said)
        elif not workload.stock_loss:
            yield Decision("yours.loss", Message("your own loss is computed as it is"))

    # ----------------------------------------------------------------- what is not used

    def _unused(self) -> Iterator[Decision]:
        for name, reason in self.asked.left_out.items():
            if self.candidate.get(name) is None:
                said = Message(
                    "not used: {name}, because {reason}", name=called(name), reason=reason
                )
                yield Decision("unused.cannot", said, name)
        missed = self.asked.exact and self.asked.card is not None
        for kind in ORDER:
            if missed and kind.missed_if_exact:
                said = Message(
                    "not used: {name}, because --exact forbids rounding", name=kind.called()
                )
                yield Decision("unused.exact", said, kind.name)
        known = self.asked.left_out
        for kind in ORDER:
            is_known = self.candidate.get(kind.name) or kind.name in known
            if kind.missed_if_needless and not is_known:
                yield from self._needless(kind())

    def _needless(self, strategy: Strategy) -> Iterator[Decision]:
        if self.asked.workload.args.gradient_checkpointing:
            return
        with_it = replace(
            self.candidate, strategies=tuple(ordered([*self.candidate.strategies, strategy]))
        )
        slower = self.pricer.quick(with_it).step_seconds / self.quick.step_seconds - 1
        said = Message(
            "not used: {name}, because everything fits without it and it would cost "
            "{cost} of the step",
            name=strategy.called(),
            cost=percent(max(slower, 0.0)),
        )
        yield Decision("unused.needless", said, strategy.name)

    # ------------------------------------------- figures, for what strategies say themselves

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return self.asked.workload

    @property
    def effects(self) -> Effects:
        """What the plan's strategies do together."""
        return self.candidate.effects

    @property
    def depth(self) -> int:
        """Layers a text passes."""
        return self.asked.depth

    @property
    def learning_parameters(self) -> int:
        """How many parameters learn."""
        return self.pricer.learning_parameters(self.candidate)

    @property
    def host_bytes(self) -> int:
        """What the plan keeps in host memory."""
        return self.price.host_bytes

    @property
    def kernels(self) -> float:
        """How many kernels a step runs."""
        return self.quick.counts.replayed + self.quick.counts.launches

    def padding_share(self) -> float:
        """How much of every batch would be padding."""
        return batches_of(self.workload, self.candidate.strategies).padding_share()

    def saves(self, strategy: Strategy, instead: Option = ()) -> dict[str, str]:
        """Returns `saved` bytes and `cost` in time against the plan without it, in words."""
        than = self._without(strategy, instead)
        saved = than.device_bytes - self.quick.device_bytes
        cost = 1 - than.step_seconds / self.quick.step_seconds
        return {"saved": gb(max(saved, 0)), "cost": percent(max(cost, 0.0))}

    def seconds_saved(self, strategy: Strategy) -> float:
        """Returns by how much a step is faster than without it."""
        return self._without(strategy).step_seconds - self.quick.step_seconds

    def _without(self, strategy: Strategy, instead: Option = ()) -> Price:
        rest = [one for one in self.candidate.strategies if one.name != strategy.name]
        other = replace(self.candidate, strategies=tuple(ordered([*rest, *instead])))
        return self.pricer.quick(other)
