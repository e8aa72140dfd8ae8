"""Each decision of a plan and its reason, with the figures behind it.

What a strategy saves and costs is the difference to the same plan without it, by quick prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from memfit.planner.candidates import Candidate, Price, Pricer
from memfit.planner.plans import Decision
from memfit.planner.space import PlanRequest
from memfit.planner.workload import batches_of
from memfit.strategies import (
    Checkpointing,
    Fidelity,
    GradientRelease,
    LowBitAdamW,
    Strategy,
    by_name,
    called,
    ordered,
)
from memfit.text import N_, NP_, Message
from memfit.units import duration

_BYTES_PER_PARAMETER = {24: 5.03, 16: 4.03}
"""Weights and optimizer state of the low-bit optimizer; AdamW in fp32 has 12."""

_PHASES = {
    "training": NP_("while", "training"),
    "evaluation": NP_("while", "evaluating"),
    "saving": NP_("while", "saving"),
    "resuming": NP_("while", "resuming"),
}

_USED = {
    "fused_attention": N_(
        "attention is fused: weights of the square of the length are never stored"
    ),
    "fused_layers": N_(
        "the small operators of every layer are fused: fewer passes over memory, less kept"
    ),
    "small_workspace": N_("cuBLAS gets small workspaces, which these products do not need larger"),
    "half_precision": N_(
        "computes in {dtype} over float32 weights: half the activations, faster products"
    ),
    "small_state_optimizer": N_(
        "{rule} instead of AdamW, as you allowed: its state is nearly nothing"
    ),
    "lora": N_("only LoRA adapters of rank {rank} and the head learn, as you allowed"),
    "freezing": N_("frozen, as you allowed: {what}"),
    "frozen_features": N_(
        "the frozen encoder runs once over all texts, every epoch trains the head alone"
    ),
}
"""Strategies whose sentence needs no figures but their own settings."""

_RELEASED = {
    "kept8": N_(
        "gradients kept in 8 bits, because the global norm is needed to clip at "
        "{norm}: saves {saved}"
    ),
    "kept8, summed": N_("gradients of several micro-batches are added up in 8 bits: saves {saved}"),
    "host": N_(
        "gradients wait in host memory, {saved} of them; the true norm is still clipped at {norm}"
    ),
    "two_pass": N_(
        "backward runs twice, first for the norm to clip at {norm}, then to "
        "update: no gradient is kept, which saves {saved}"
    ),
    "release": N_("weights are updated inside backward, since nothing is clipped: saves {saved}"),
    "release, predicted": N_(
        "weights are updated inside backward and clipped at {norm} by a norm "
        "predicted from earlier steps: saves {saved}, another update rule, as "
        "you allowed"
    ),
}


def gb(count: float) -> str:
    """Decimal units, as budgets are written: 0.61 GB, 43 MB."""
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e8 else f"{count / 1e6:.0f} MB"


def percent(share: float) -> str:
    """A share for a person: 11 %."""
    return f"{100 * share:.0f} %"


def step_time(seconds: float) -> str:
    """A step's time: 18.4 ms, 1.25 s."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


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
        found = [self._memory(), self._time(), self._micro_batches()]
        for strategy in self.candidate.strategies:
            found.append(self._used(strategy))
            if isinstance(strategy, LowBitAdamW) and not self.candidate.get("gradient_release"):
                found.append(
                    Decision(
                        "gradients.kept",
                        Message(
                            "gradients are kept in 2 bytes a parameter until the update: {bytes}",
                            bytes=gb(2 * self._learning()),
                        ),
                    )
                )
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

    def _micro_batches(self) -> Decision:
        workload, limits = self.asked.workload, self.candidate.micro_batching
        packed = self.candidate.get("packing") is not None
        cut = batches_of(workload, self.candidate.strategies).cut(limits, packed=packed)
        fields = {"rows": f"{workload.effective_rows:,}", "tokens": f"{cut.worst_tokens:,}"}
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

    # --------------------------------------------------------------------- what is used

    def _used(self, strategy: Strategy) -> Decision:
        special: dict[str, Callable[[Any], Message]] = {
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
            return Decision(strategy.name, special[strategy.name](strategy), strategy.name)
        fields = {
            name: str(getattr(strategy, name))
            for name in ("dtype", "rule", "rank", "what")
            if hasattr(strategy, name)
        }
        if strategy.name in _USED:
            return Decision(strategy.name, Message(_USED[strategy.name], **fields), strategy.name)
        used = Message("used: {name}", name=strategy.called())
        return Decision(strategy.name, used, strategy.name)

    def _recomputed(self, strategy: Checkpointing) -> Message:
        fields = self._layers(strategy)
        if strategy.part == "mlp":
            return Message(
                "recomputes the MLP half of {count} of {depth} layers: saves {saved}, "
                "costs {cost} of the step",
                **fields,
            )
        return Message(
            "recomputes {count} of {depth} layers: saves {saved}, costs {cost} of the step",
            **fields,
        )

    def _offloaded(self, strategy: Strategy) -> Message:
        return Message(
            "activations of {count} of {depth} layers wait in host memory: saves "
            "{saved}, costs {cost} of the step",
            **self._layers(strategy),
        )

    def _layers(self, strategy: Any) -> dict[str, str]:
        count = self.asked.depth if strategy.layers is None else strategy.layers
        difference = self._difference(self._without(strategy.name))
        return {"count": str(count), "depth": str(self.asked.depth), **difference}

    def _low_bit(self, strategy: LowBitAdamW) -> Message:
        size = _BYTES_PER_PARAMETER[strategy.master_bits]
        return Message(
            "weights in {dtype} with {bits}-bit masters and 8-bit moments: {bytes} "
            "bytes a parameter instead of 12, saves {saved}",
            dtype=strategy.dtype,
            bits=str(strategy.master_bits),
            bytes=f"{size:.0f}",
            saved=gb((12 - size) * self._learning()),
        )

    def _released(self, strategy: GradientRelease) -> Message:
        clips = self.asked.workload.args.max_grad_norm or 0
        kept = 1.0 if strategy.mode == "kept8" else 2.0
        fields = {"norm": f"{clips:g}", "saved": gb(kept * self._learning())}
        mode: str = strategy.mode
        if mode == "kept8" and not clips:
            mode = "kept8, summed"
        if mode == "release" and strategy.clip == "predicted":
            mode = "release, predicted"
        return Message(_RELEASED[mode], **fields)

    def _hosted(self, strategy: Any) -> Message:
        rest = [one for one in self.candidate.strategies if one.name != strategy.name]
        if strategy.dtype is not None:
            rest.append(LowBitAdamW(dtype=strategy.dtype))  # the same weights, the state here
        there = replace(self.candidate, strategies=tuple(ordered(rest)))
        fields = {"host": gb(self.price.host_bytes), **self._difference(there)}
        if strategy.weights:
            return Message(
                "AdamW runs on the CPU and layers' weights come from host memory two at "
                "a time, {host} there: saves {saved}, costs {cost} of the step",
                **fields,
            )
        return Message(
            "AdamW runs on the CPU with its state in host memory, {host} there: "
            "saves {saved}, costs {cost} of the step",
            **fields,
        )

    def _state_hosted(self, strategy: Any) -> Message:
        fields = self._difference(self._without(strategy.name))
        fields["host"] = gb(self.price.host_bytes)
        if strategy.gradients:
            return Message(
                "the optimizer's state and the 8-bit gradients lie in host memory, "
                "{host} there, where the card reads and writes them: saves {saved}, "
                "costs {cost} of the step",
                **fields,
            )
        return Message(
            "the optimizer's state lies in host memory, {host} there, where the "
            "card's update reads and writes it: saves {saved}, costs {cost} of the "
            "step",
            **fields,
        )

    def _graphs(self, strategy: Strategy) -> Message:
        launched = self.pricer.quick(self._without(strategy.name))
        saved = launched.step_seconds - self.quick.step_seconds
        counts = self.quick.counts
        launches = f"{counts.replayed + counts.launches:,.0f}"
        return Message(
            "the step is replayed as CUDA graphs: about {launches} kernels start "
            "without Python, which saves {saved_time} of a step",
            launches=launches,
            saved_time=step_time(max(saved, 0.0)),
        )

    def _packed(self, strategy: Strategy) -> Message:  # noqa: ARG002
        share = batches_of(self.asked.workload, self.candidate.strategies).padding_share()
        return Message(
            "texts are packed without padding, which would be {share} of every batch",
            share=percent(share),
        )

    def _truncated(self, strategy: Any) -> Message:
        lengths = self.asked.workload.lengths
        cut = sum(length > strategy.max_length for length in lengths) / len(lengths)
        return Message(
            "texts are cut at {tokens} tokens, as you allowed: {share} of the rows lose their end",
            tokens=str(strategy.max_length),
            share=percent(cut),
        )

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
        if not workload.stock_loss:
            yield Decision("yours.loss", Message("your own loss is computed as it is"))

    # ----------------------------------------------------------------- what is not used

    def _unused(self) -> Iterator[Decision]:
        for name, reason in self.asked.left_out.items():
            if self.candidate.get(name) is None:
                said = Message(
                    "not used: {name}, because {reason}", name=called(name), reason=reason
                )
                yield Decision("unused.cannot", said, name)
        if self.asked.exact and self.asked.card is not None:
            for name in ("lowbit_adamw", "half_precision"):
                if by_name(name)().fidelity is not Fidelity.EXACT:
                    said = Message(
                        "not used: {name}, because --exact forbids rounding", name=called(name)
                    )
                    yield Decision("unused.exact", said, name)
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
        said = Message(
            "not used: {name}, because everything fits without it and it would cost "
            "{cost} of the step",
            name=strategy.called(),
            cost=percent(max(slower, 0.0)),
        )
        yield Decision("unused.needless", said, strategy.name)

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
