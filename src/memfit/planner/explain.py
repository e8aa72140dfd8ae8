"""Each decision of a plan and its reason, with the figures behind it; and what else to know.

A strategy explains itself; this module has the figures. What a strategy saves and costs is the
difference to the price of the same plan without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memfit.i18n import N_, NP_, Message
from memfit.memory.cards import DeviceProfile
from memfit.memory.components import Component
from memfit.planner.plan import Decision
from memfit.planner.price import Price, Pricer
from memfit.planner.rank_cost import link_bytes_per_second
from memfit.planner.task import Task
from memfit.strategies import (
    Checkpointing,
    FullySharded,
    GradientRelease,
    HalfPrecision,
    LowBitAdamW,
    Strategy,
    called,
    find,
    ordered,
    title_of,
)
from memfit.units import duration, gb, percent, step_time

_PHASES = {
    "training": NP_("while", "training"),
    "evaluation": NP_("while", "evaluating"),
    "saving": NP_("while", "saving"),
    "resuming": NP_("while", "resuming"),
}


def explain(
    price: Price, task: Task, pricer: Pricer, left_out: Mapping[str, str]
) -> tuple[Decision, ...]:
    """The plan as a whole, what it uses, what of the user's it keeps, what it leaves out."""
    return _Explaining(price, task, pricer, left_out).decisions()


@dataclass(frozen=True)
class _Explaining:
    """A plan's price and the figures beside it, for the sentences of its strategies."""

    price: Price
    task: Task
    pricer: Pricer
    left_out: Mapping[str, str]

    def decisions(self) -> tuple[Decision, ...]:
        """All of them, in the order they are read."""
        found = [self._memory(), self._time(), *self._ranks(), self._micro_batches()]
        for strategy in self.price.strategies:
            found.append(Decision(strategy.name, strategy.explain(self), strategy.name))
            if isinstance(strategy, LowBitAdamW) and not self._has(GradientRelease):
                kept = gb(2 * self.trainable_parameters)
                said = Message(
                    "gradients are kept in 2 bytes a parameter until the update: {bytes}",
                    bytes=kept,
                )
                found.append(Decision("gradients.kept", said))
        return (*found, *self._yours(), *self._unused())

    def _has(self, kind: type[Strategy]) -> bool:
        return find(self.price.strategies, kind) is not None

    # --------------------------------------------------------------- the plan as a whole

    def _memory(self) -> Decision:
        peaks = {name: one.device_bytes for name, one in self.price.phases.items()}
        phase = max(peaks, key=lambda name: peaks[name], default="training")
        peak = self.price.device_bytes
        said = Message(
            "peaks at {peak} of {budget} ({share}), while {phase}",
            peak=gb(peak),
            budget=gb(self.task.budget_bytes),
            share=percent(peak / max(self.task.budget_bytes, 1)),
            phase=Message(_PHASES[phase]) if phase in _PHASES else phase,
        )
        return Decision("memory", said)

    def _time(self) -> Decision:
        task = self.task
        steps, seconds = task.steps_per_epoch, self.price.step_seconds
        total = (
            task.args.max_steps if task.args.max_steps > 0 else steps * task.args.num_train_epochs
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
        task = self.task
        if task.ranks == 1:
            return
        cost = self.pricer.exchange(
            self.price.strategies, self.price.micro_batching, self.price.step_seconds
        )
        exchange = Message("sum {sent} of gradients", sent=gb(cost.sent_bytes))
        if cost.gathered_bytes:
            exchange = Message(
                "sum {sent} of gradients and gather {weights} of weights",
                sent=gb(cost.sent_bytes),
                weights=gb(cost.gathered_bytes),
            )
        fields = {
            "ranks": str(task.ranks),
            "rows": f"{task.rank_rows:,}",
            "every": f"{task.effective_rows:,}",
            "exchange": exchange,
            "rate": gb(link_bytes_per_second(task.card)),
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
        task, limits = self.task, self.price.micro_batching
        cut = self.pricer.cutting(self.price.strategies, limits)
        fields = {"rows": f"{task.rank_rows:,}", "tokens": f"{cut.worst_tokens:,}"}
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
        """What the user set, and what becomes of it."""
        task, args = self.task, self.task.args
        kept = N_("{name}: you set it; it is kept")
        if args.gradient_checkpointing:
            said = Message(
                "gradient_checkpointing: you set it; it is kept, and every layer is recomputed"
            )
            yield Decision("yours.checkpointing", said)
        for name in ("bf16", "fp16"):
            if name in task.user_set or getattr(args, name):
                said = Message(kept, name=f"{name}={getattr(args, name)}")
                yield Decision("yours.precision", said)
        if "optim" in task.user_set:
            chosen = str(getattr(args.optim, "value", args.optim))
            yield Decision("yours.optim", Message(kept, name=f"optim={chosen}"))
        if args.torch_compile:
            said = Message(
                "torch_compile: you set it; it is kept, and wants the same shapes in every step"
            )
            yield Decision("yours.compile", said)
        if task.freeze is not None:
            yield Decision("yours.freeze", Message("frozen by you: {what}", what=task.freeze))
        if task.lora is not None:
            said = Message("your LoRA adapters of rank {rank} are kept", rank=str(task.lora))
            yield Decision("yours.lora", said)
        if task.weighted_loss:
            said = Message("the loss is weighted by class, as --class-weights says")
            yield Decision("yours.class_weights", said)
        elif args.label_smoothing_factor:
            said = Message("the loss is smoothed, as --label-smoothing-factor says")
            yield Decision("yours.smoothing", said)
        elif not task.stock_loss:
            yield Decision("yours.loss", Message("your own loss is computed as it is"))

    # ----------------------------------------------------------------- what is not used

    def _unused(self) -> Iterator[Decision]:
        names = {one.name for one in self.price.strategies}
        for name, reason in self.left_out.items():
            if name not in names:
                said = Message(
                    "not used: {name}, because {reason}",
                    name=title_of(name),
                    reason=reason,
                )
                yield Decision("unused.cannot", said, name)
        if self.task.exact and self.task.card is not None:
            for kind in (HalfPrecision, LowBitAdamW):
                said = Message(
                    "not used: {name}, because --exact forbids rounding", name=called(kind)
                )
                yield Decision("unused.exact", said, kind.name)
        again = Checkpointing()
        known = again.name in self.left_out or self.task.args.gradient_checkpointing
        if known or self._has(Checkpointing):
            return
        with_it = self.pricer.counts(
            tuple(ordered([*self.price.strategies, again])), self.price.micro_batching
        )
        seconds = self.pricer.seconds(self.price.strategies, self.price.micro_batching, with_it)
        said = Message(
            "not used: {name}, because everything fits without it and it would cost "
            "{cost} of the step",
            name=called(again),
            cost=percent(max(seconds / self.price.step_seconds - 1, 0.0)),
        )
        yield Decision("unused.needless", said, again.name)

    # ---- figures, for what strategies say themselves ----

    @property
    def trainable_parameters(self) -> int:
        """How many parameters learn."""
        return self.price.trainable_parameters

    @property
    def host_bytes(self) -> int:
        """What the plan holds in host memory."""
        return self.price.host_bytes

    @property
    def kernels(self) -> float:
        """How many kernels a step runs."""
        return self.price.counts.replayed + self.price.counts.launches

    def padding_share(self) -> float:
        """How much of every batch would be padding."""
        return self.task.batches(self.price.strategies).padding_share()

    def saves(self, strategy: Strategy, instead: tuple[Strategy, ...] = ()) -> dict[str, str]:
        """Returns `saved` bytes and `cost` in time against the plan without it, in words."""
        than = self._without(strategy, instead)
        saved = than.device_bytes - self.price.device_bytes
        cost = 1 - than.step_seconds / self.price.step_seconds
        return {"saved": gb(max(saved, 0)), "cost": percent(max(cost, 0.0))}

    def seconds_saved(self, strategy: Strategy) -> float:
        """Returns by how much a step is faster than without it."""
        return self._without(strategy).step_seconds - self.price.step_seconds

    def _without(self, strategy: Strategy, instead: tuple[Strategy, ...] = ()) -> Price:
        rest = [one for one in self.price.strategies if one.name != strategy.name]
        return self.pricer.price(tuple(ordered([*rest, *instead])), self.price.micro_batching)


def host_note(passed_over: Sequence[Price], chosen: Price, free_bytes: int) -> list[Decision]:
    """That a faster plan wants more host memory than there is."""
    faster = [one for one in passed_over if one.step_seconds < chosen.step_seconds]
    if not faster:
        return []
    least = min(one.host_bytes for one in faster)
    return [
        Decision(
            "note.host",
            Message(
                "a faster plan was passed over: it needs {needs} of the computer's "
                "memory, of which {free} are free",
                needs=gb(least),
                free=gb(free_bytes),
            ),
        )
    ]


def disk_note(task: Task, price: Price, free_bytes: int | None) -> list[Decision]:
    """That the checkpoints of a run do not go onto the disk."""
    if free_bytes is None:
        return []
    parts, count = price.peak.components, kept_checkpoints(task)
    # What ranks divide among them is saved as one.
    shares = task.ranks if find(price.strategies, FullySharded) else 1
    model = parts.get(Component.WEIGHTS, 0) * shares
    each = model + parts.get(Component.OPTIMIZER, 0) * shares + price.host_bytes
    needs = count * each + model
    if needs <= free_bytes:
        return []
    said = Message(
        "checkpoints will take {needs} on the disk ({count} of {each} and the "
        "final model), of which {free} are free; lower --save-total-limit or "
        "choose another folder",
        needs=gb(needs),
        count=str(count),
        each=gb(each),
        free=gb(free_bytes),
    )
    return [Decision("note.disk", said)]


def guess_note(operators: Sequence[str]) -> list[Decision]:
    """That the time of some operators is a guess."""
    if not operators:
        return []
    return [
        Decision(
            "note.guess",
            Message(
                "what {operators} compute could not be counted, so their time is a guess "
                "from the sizes of what goes in and comes out",
                operators=", ".join(operators),
            ),
        )
    ]


def margin_note(card: DeviceProfile | None) -> list[Decision]:
    """What is kept of a card that is not here, for what is not known of it and for its system."""
    if card is None or card.here:
        return []
    notes = []
    if card.margin_bytes:
        said = Message(
            "the {card} is not here: {margin} are kept for what is not known of it (a context of "
            "{low} to {high}, totals that differ by driver); memfit doctor --measure there finds "
            "out",
            card=card.name,
            margin=gb(card.margin_bytes),
            low=gb(card.context_low_bytes),
            high=gb(card.context_bytes),
        )
        notes.append(Decision("note.margin", said))
    if card.reserved_bytes:
        kind = N_("{held} of the card are left to others, such as a display")
        if card.windows:
            kind = N_(
                "{held} of the card are left to Windows and its desktop; past the rest its driver "
                "pages to host memory, slowly and without an error"
            )
        notes.append(Decision("note.system", Message(kind, held=gb(card.reserved_bytes))))
    return notes


def kept_checkpoints(task: Task) -> int:
    """How many checkpoints are on the disk at once; a new one is written before an old one goes."""
    args = task.args
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "no":
        return 0
    epochs = max(1, round(args.num_train_epochs))
    steps = args.max_steps if args.max_steps > 0 else epochs * task.steps_per_epoch
    every = args.save_steps if strategy == "steps" else task.steps_per_epoch
    every = round(every * steps) if every < 1 else round(every)
    written = max(1, -(-steps // max(every, 1)))
    limit = args.save_total_limit
    return written if not limit else min(written, limit + 1)
