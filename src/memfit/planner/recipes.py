"""The recipes the planner tries: strategies that are used together, a row each, with the reason.

For 131 tasks (11 cards, 5 models, 2 lengths, 21 budgets on an H200) these rows were within 5 % of
the best of 99 kinds of plans. A row is tried at the settings where it fits best: tokens of a
micro-batch and, by its dial, how many layers are recomputed or wait in host memory. Packing, fused
layers and small workspaces beside graphs cost nothing: they are added to every row that they work
with. What the user fixed and what --allow permits filter and extend the table (`recipes_for`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from memfit.config.schema import ALLOWABLE
from memfit.errors import ConfigError
from memfit.i18n import Message
from memfit.planner.price import fidelity_of
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Fidelity,
    Freezing,
    FrozenFeatures,
    FullySharded,
    FusedAttention,
    FusedLayers,
    GradientRelease,
    HalfPrecision,
    Lora,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    SmallStateOptimizer,
    SmallWorkspace,
    StateOffload,
    Strategy,
    Truncation,
    find,
    ordered,
)
from memfit.strategies.base import CANNOT_BE_USED
from memfit.strategies.half_precision import has_fast_bf16
from memfit.strategies.truncation import choose_length

if TYPE_CHECKING:
    from memfit.planner.task import Task
    from memfit.planner.trace import Tracer

Dial = Literal["", "recomputed", "offloaded"]

_PERMISSIONS: dict[type[Strategy], str] = {
    SmallStateOptimizer: "optimizer",
    Lora: "lora",
    Freezing: "freeze",
    FrozenFeatures: "freeze",
    Truncation: "truncate",
}
"""The word for --allow of each strategy that is below `rounding`."""

_CUT_SHARES = (0.05, 0.2)
"""Shares of the rows that a shorter length may cut."""


@dataclass(frozen=True)
class Recipe:
    """Strategies that are used together."""

    name: str
    strategies: tuple[Strategy, ...]
    dial: Dial = "recomputed"
    """What is done for some of the layers."""
    after: str = ""
    """The recipe that this one is never faster than, with nothing recomputed in one micro-batch."""

    def with_layers(self, count: int, depth: int) -> tuple[Strategy, ...]:
        """The strategies with so many layers recomputed or offloaded."""
        if not count or not self.dial:
            return self.strategies
        layers = None if count >= depth else count
        dialled: Strategy = Checkpointing(layers)
        if self.dial == "offloaded":
            dialled = ActivationOffload(layers)
        return tuple(ordered([*self.strategies, dialled]))

    def counts(self, depth: int) -> list[int]:
        """The numbers of layers its dial may be set to."""
        if self.dial == "offloaded":  # a quarter more each: copies cost little beside recomputing
            return sorted({max(depth * share // 4, 1) for share in (1, 2, 3)} | {depth})
        return list(range(depth + 1)) if self.dial else [0]

    @property
    def cuts_batches(self) -> bool:
        """Whether a step may have several micro-batches.

        Gradients in `.grad` would be a graph's own memory, written anew by each replay.
        """
        return not find(self.strategies, CudaGraphs) or bool(find(self.strategies, GradientRelease))


def _table(task: Task) -> Iterator[Recipe]:
    """The rows for a card; the search begins with those that could be fastest."""
    half, small = task.half, SmallWorkspace()
    low = LowBitAdamW(24, half)
    kept8, host = GradientRelease("kept8"), GradientRelease("host")
    state, both = StateOffload(), StateOffload(gradients=True)
    # Five bytes a parameter instead of twelve, and as fast as any: where the card waits for Python,
    # replayed; where it does not, launched. What leaves the card next, the cheapest first.
    stored: tuple[tuple[str, tuple[Strategy, ...]], ...] = (
        ("", ()),
        (", 8-bit gradients", (kept8,)),  # a byte a parameter less; many micro-batches replayed
        (", host state", (state,)),  # three bytes less, which cross the bus once a step
        (", 8-bit gradients, host state", (kept8, state)),
        (", host state and gradients", (kept8, both)),  # the gradients once a micro-batch
    )
    # 16-bit masters round every update: only where a step is faster by more than a tenth.
    for name, masters in (("low-bit", low), ("16 bits", LowBitAdamW(16, half))):
        for more, strategies in stored:
            beside = (masters, *strategies)
            for graphs, last in (("", ()), (", graphs", (CudaGraphs(),))):
                made = f"{name}{more}{graphs}"
                after = "" if made.startswith("low-bit") and not more else f"low-bit{graphs}"
                yield Recipe(made, (*beside, *last), after=after)
    # Activations wait in host memory: on small cards the bus is idle while layers are computed.
    yield Recipe("host gradients", (low, host), after="low-bit")
    yield Recipe("offload", (low,), "offloaded", after="low-bit")
    yield Recipe("host state, offload", (low, kept8, state), "offloaded", after="low-bit")
    # AdamW on the CPU: the only small update without Triton, and the last resort everywhere.
    if not task.skips_bad_steps:
        if half == "bfloat16":
            cpu = OptimizerOffload(dtype="bfloat16")
            yield Recipe("CPU update", (cpu,), after="low-bit")
            yield Recipe("CPU update, offload", (cpu,), "offloaded", after="low-bit")
            hosted = OptimizerOffload(True, "bfloat16")
            yield Recipe("weights on the host", (hosted, small), after="low-bit")
        yield Recipe("CPU update, fp32", (OptimizerOffload(),), after="fp32")
        yield Recipe("CPU update, fp32, offload", (OptimizerOffload(),), "offloaded", after="fp32")
        yield Recipe("weights on the host, fp32", (OptimizerOffload(True), small), after="fp32")
    # Plain AdamW: for --exact, without Triton (the low-bit update is slow there), without matrix
    # units (half precision is), and where the low-bit optimizer cannot be used.
    yield Recipe("half", (HalfPrecision(half),))
    yield Recipe("half, offload", (HalfPrecision(half),), "offloaded", after="half")
    yield Recipe("fp32", ())
    yield Recipe("fp32, offload", (), "offloaded", after="fp32")
    yield Recipe("sharded", (HalfPrecision(half), FullySharded()), after="half")
    yield Recipe("sharded, fp32", (FullySharded(),), after="fp32")
    yield Recipe("Adafactor", (HalfPrecision(half), SmallStateOptimizer()), after="half")
    yield Recipe("Adafactor, fp32", (SmallStateOptimizer(),), after="fp32")


def _cpu_table(task: Task) -> Iterator[Recipe]:
    if has_fast_bf16():
        yield Recipe("half", (HalfPrecision(task.half),))
    yield Recipe("fp32", ())
    yield Recipe("sharded, fp32", (FullySharded(),), after="fp32")


@dataclass(frozen=True)
class RecipeTable:
    """The recipes for a task, and why the strategies of other recipes cannot be used."""

    recipes: tuple[Recipe, ...]
    left_out: dict[str, str]


def recipes_for(task: Task, tracer: Tracer) -> RecipeTable:
    """The rows that can be used for this task, by what the user fixed and permits."""
    _check_permissions(task)
    rows = list(_table(task) if task.card is not None else _cpu_table(task))
    rows = [row for row in rows if _is_wanted(row, task)]
    rows += [made for base in rows for made in _permitted(base, task)]
    left_out: dict[str, str] = {}
    if task.device_kind not in ("cuda", "cpu"):
        left_out[HalfPrecision.name] = Message(
            "it was not measured on {kind} devices; --bf16 or --fp16 asks for it",
            kind=task.device_kind,
        )
        rows = [row for row in rows if not find(row.strategies, HalfPrecision)]
    elif task.card is None and not task.refuses_half and not task.exact and not has_fast_bf16():
        left_out[HalfPrecision.name] = Message("this CPU has no bfloat16 instructions")
    left_out |= _objections(rows, task, tracer)
    free = _free(task, tracer, left_out)
    usable = [row for row in rows if not any(one.name in left_out for one in row.strategies)]
    made = [
        _with_free(_dialled(row, task, left_out), free) for row in _without_slower(task, usable)
    ]
    return RecipeTable(tuple(row for row in made if row is not None), left_out)


def fixed_recipe(strategies: Sequence[Strategy]) -> Recipe:
    """The strategies a user or a plan's file names, as they are."""
    return Recipe("given", tuple(ordered(strategies)), dial="")


def permission_of(strategy: Strategy) -> str:
    """Returns the word for --allow that this strategy needs; empty where it needs none."""
    if strategy.fidelity <= Fidelity.ROUNDING:
        return ""
    return _PERMISSIONS.get(type(strategy), strategy.name)


def _check_permissions(task: Task) -> None:
    if task.exact and task.allow:
        allow = ",".join(sorted(task.allow))
        raise ConfigError("--exact and --allow {allow} exclude each other; choose one", allow=allow)
    from memfit.errors import nearest

    for name in sorted(task.allow.difference(ALLOWABLE)):
        raise ConfigError(
            "cannot allow {name}; {known}.{hint}",
            name=repr(name),
            known=", ".join(ALLOWABLE),
            hint=nearest(name, ALLOWABLE),
        )


def _is_wanted(row: Recipe, task: Task) -> bool:
    """Whether the user's own words leave this row."""
    if task.exact and fidelity_of(row.strategies) is not Fidelity.EXACT:
        return False
    if any(permission_of(one) not in ("", *task.allow) for one in row.strategies):
        return False
    if find(row.strategies, FullySharded) and task.ranks == 1:
        return False
    updates = find(row.strategies, OptimizerOffload)
    halves = (find(row.strategies, HalfPrecision), find(row.strategies, LowBitAdamW))
    in_half = any(halves) or (updates is not None and updates.dtype is not None)
    return not (in_half and task.refuses_half)


def _permitted(base: Recipe, task: Task) -> Iterator[Recipe]:
    """What --allow makes of a row: fewer weights learn, or texts are shorter."""
    variants: list[tuple[str, tuple[Strategy, ...]]] = []
    few = not any(
        find(base.strategies, kind)
        for kind in (GradientRelease, StateOffload, OptimizerOffload, SmallStateOptimizer)
    )
    is_free = task.freeze is None and task.lora is None
    if "lora" in task.allow and is_free and few:
        variants.append(("lora", (Lora(),)))
    if "freeze" in task.allow and few:
        if is_free:
            variants.append(("embeddings frozen", (Freezing("embeddings"),)))
            variants.append(("encoder frozen", (Freezing("encoder"),)))
            variants.append(("features", (Freezing("encoder"), FrozenFeatures())))
        elif task.freeze == "encoder":
            variants.append(("features", (FrozenFeatures(),)))
    for name, added in variants:
        names, beside = ({one.name for one in some} for some in (base.strategies, added))
        if any(one.conflicts & names for one in added):
            continue
        if any(one.conflicts & beside for one in base.strategies):
            continue
        layers_are_kept = name in ("lora", "embeddings frozen")
        if not layers_are_kept and base.dial == "offloaded":
            continue
        yield replace(
            base,
            name=f"{base.name}, {name}",
            strategies=(*added, *base.strategies),
            dial=base.dial if layers_are_kept else "",
            after=f"{base.after}, {name}" if base.after else "",
        )
    if "truncate" in task.allow:
        lengths = task.lengths
        shorter = {choose_length(lengths, cut_at_most=share) for share in _CUT_SHARES}
        shorter.add(max(8, task.longest_tokens // 2 // 8 * 8))
        for tokens in sorted((one for one in shorter if one < max(lengths)), reverse=True):
            yield replace(
                base,
                name=f"{base.name}, {tokens} tokens",
                strategies=(Truncation(tokens), *base.strategies),
                after=f"{base.after}, {tokens} tokens" if base.after else "",
            )


def _free(task: Task, tracer: Tracer, left_out: Mapping[str, str]) -> tuple[Strategy, ...]:
    """What costs neither time nor fidelity here."""
    asked: list[Strategy] = [Packing()]
    if task.card is not None:
        asked.append(FusedLayers())
        if not tracer.objections([SmallWorkspace()]):
            asked.append(SmallWorkspace())
    eager = getattr(task.config, "_attn_implementation", None) == "eager"
    if eager and Packing.name in left_out and "attn_implementation" not in task.user_set:
        asked.append(FusedAttention())
    return tuple(one for one in asked if one.name not in left_out)


def _objections(rows: Sequence[Recipe], task: Task, tracer: Tracer) -> dict[str, str]:
    """Why strategies of these rows cannot be used, each asked beside what it is used with."""
    used = {one.name for row in rows for one in row.strategies}
    layers = not _layers_are_fixed(task)
    on_card = task.card is not None
    groups: list[list[Strategy]] = [
        [
            Packing(),
            *([FusedLayers()] if on_card else []),
            *([Checkpointing()] if layers else []),
            *([ActivationOffload()] if on_card else []),
            LowBitAdamW(dtype=task.half),
            GradientRelease("kept8"),
            StateOffload(gradients=True),
            CudaGraphs(),
        ],
        [HalfPrecision(task.half), FullySharded()],
        [OptimizerOffload(dtype="bfloat16" if task.half == "bfloat16" else None)],
        [SmallStateOptimizer()],
        [Lora()],
        [Freezing("encoder"), FrozenFeatures()],
    ]
    if getattr(task.config, "_attn_implementation", None) == "eager":
        groups.append([FusedAttention()])
    always = {"packing", "fused_layers", "fused_attention", "checkpointing", "activation_offload"}
    found: dict[str, str] = {}
    for group in groups:
        asked = [one for one in group if one.name in used | always]
        if asked:
            found |= {name: _bare(name, why) for name, why in tracer.objections(asked).items()}
    if LowBitAdamW.name in found or LowBitAdamW.name not in used:
        for needs_it in (GradientRelease, StateOffload, CudaGraphs):
            found.pop(needs_it.name, None)
    if Packing.name not in found:
        found.pop(FusedAttention.name, None)
    return found


def _without_slower(task: Task, rows: list[Recipe]) -> list[Recipe]:
    """Drops float32 weights where the low-bit optimizer runs its update in Triton.

    They are the same arithmetic with more memory and more traffic, so slower and larger. (On
    several ranks there are no graphs, and more kernels to launch may weigh more.)
    """
    card = task.card
    has_low = any(find(row.strategies, LowBitAdamW) for row in rows)
    if card is None or task.ranks > 1 or not has_low:
        return rows
    if not (card.has_triton and card.matrix_units):
        return rows
    kinds = (LowBitAdamW, FullySharded, SmallStateOptimizer)
    updates = (find(row.strategies, OptimizerOffload) for row in rows)
    return [
        row
        for row, update in zip(rows, updates, strict=True)
        if any(find(row.strategies, kind) for kind in kinds) or (update and update.dtype)
    ]


def _layers_are_fixed(task: Task) -> bool:
    """Whether the user decided which layers are recomputed."""
    given = "gradient_checkpointing" in task.user_set
    return given or bool(task.args.gradient_checkpointing)


def _dialled(row: Recipe, task: Task, left_out: dict[str, str]) -> Recipe:
    """The row with its dial only where layers can be recomputed or offloaded."""
    name = "checkpointing" if row.dial == "recomputed" else "activation_offload"
    fixed = row.dial == "recomputed" and _layers_are_fixed(task)
    return replace(row, dial="") if fixed or name in left_out else row


def _beside(strategies: tuple[Strategy, ...], free: Sequence[Strategy]) -> list[Strategy]:
    """The free strategies that can stand beside these."""
    names = {one.name for one in strategies}
    return [
        one
        for one in free
        if one.name not in names
        and not one.conflicts & names
        and not any(one.name in other.conflicts for other in strategies)
    ]


def _with_free(row: Recipe, free: tuple[Strategy, ...]) -> Recipe | None:
    """The row with what costs nothing; None where it cannot stand beside what it needs."""
    added = _beside(row.strategies, free)
    if find(row.strategies, CudaGraphs) is None:
        # Launched products look the setting of small workspaces up each time.
        added = [one for one in added if not isinstance(one, SmallWorkspace)]
    elif find(added, Packing) is None:
        return None
    wanted = [one for one in row.strategies if not isinstance(one, SmallWorkspace) or one in free]
    if row.dial == "offloaded" and find(row.strategies, CudaGraphs):
        return None
    return replace(row, strategies=tuple(ordered([*wanted, *added])))


def _bare(name: str, reason: str) -> str:
    """Returns the strategy's own reason, from the sentence it refuses with."""
    if (
        isinstance(reason, Message)
        and reason.text == CANNOT_BE_USED
        and reason.values["strategy"] == name
    ):
        bare: str = reason.values["reason"]
        return bare
    return reason
