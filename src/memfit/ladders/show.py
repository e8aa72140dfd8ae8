"""The ladder for people: a table at 80 columns, its sentences, and both as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.config.schema import FIDELITY_NAMES
from memfit.i18n import N_, shown, t
from memfit.ladders.rungs import (
    AUTO,
    BASELINE,
    DOES_NOT_FIT,
    HARMLESS,
    OK,
    PLAN,
    Ladder,
    Rung,
    RungOutcome,
)
from memfit.memory.components import MemoryPeak
from memfit.printing import clean
from memfit.units import format_both, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

METRICS = {"f1": "F1", "mse": "MSE"}

NONE = "–"

_RUNGS = {
    "baseline": N_("baseline, batch {rows}"),
    "accumulation": N_("+ batch 1 × {rows}"),
    "checkpointing": N_("+ checkpointing"),
    "adafactor": N_("+ Adafactor"),
    "frozen": N_("+ frozen encoder"),
    "tuned": N_("+ head at {rate}"),
    "shorter": N_("+ length {tokens}"),
    "plan": N_("memfit in {budget}"),
}

_STATUSES = {
    "does_not_fit": N_("does not fit"),
    "failed": N_("failed"),
    "not_run": N_("not run"),
}

PARTS = {
    "weights": N_("weights"),
    "gradients": N_("gradients"),
    "optimizer": N_("optimizer"),
    "activations": N_("activations"),
}
"""Components of memory that a rung can shrink."""

_WHY = {
    "optimizer": N_("another update rule"),
    "capacity": N_("fewer weights are trainable"),
    "data": N_("texts are cut"),
}


def name_of(rung: Rung) -> str:
    """A rung's label in the reader's language."""
    if rung.kind == PLAN and rung.budget == AUTO:
        return t("memfit unlimited")
    return t(_RUNGS[PLAN if rung.kind == PLAN else rung.name], **rung.words)


def metric_name(ladder: Ladder) -> str:
    """The metric's name as people write it."""
    return METRICS.get(ladder.metric, ladder.metric)


def in_short(outcome: RungOutcome) -> str:
    """A rung's peak and epoch, or its status, for the line that announced it."""
    if outcome.status != OK:
        return t(_STATUSES[outcome.status])
    if outcome.measured is None:
        return NONE
    return t("{peak}, an epoch in {epoch}", peak=_bytes(outcome.measured), epoch=_epoch(outcome))


def title(ladder: Ladder) -> str:
    """The model, the device and the rows."""
    name, device = Path(ladder.model).name, ladder.device.get("name") or NONE
    fields = {"model": clean(name), "device": clean(device), "rows": f"{ladder.rows:,}"}
    return t("{model} on {device}, {rows} rows", **fields)


def score_of(outcome: RungOutcome) -> str:
    """0.916 ±0.003; without the spread of one seed."""
    if outcome.score is None:
        return NONE
    spread = "" if outcome.spread is None else f" ±{outcome.spread:.3f}"
    return f"{outcome.score:.3f}{spread}"


def _bytes(peak: MemoryPeak | None) -> str:
    return NONE if peak is None else format_bytes(peak.device_bytes)


def _epoch(outcome: RungOutcome) -> str:
    seconds = outcome.epoch_seconds if outcome.status == OK else None
    return NONE if seconds is None else format_seconds(seconds)


# ---- the table: in the terminal, and with all columns as Markdown ----


def _cells(ladder: Ladder, one: RungOutcome) -> dict[str, str]:
    """One row of the table, by the heading of its columns."""
    times = ladder.slowdown(one) if one.status == OK else None
    off = NONE
    if one.predicted is not None and one.measured is not None and one.status != DOES_NOT_FIT:
        off = f"{one.predicted.device_bytes / one.measured.device_bytes - 1:+.1%}"
    cells = {
        t("rung"): name_of(one.rung),
        t("shrinks"): ", ".join(t(PARTS[part]) for part in one.rung.targets) or NONE,
        t("predicted"): _bytes(one.predicted),
        t("measured"): _bytes(one.measured) if one.status == OK else t(_STATUSES[one.status]),
        t("off by"): off,
        t("epoch"): _epoch(one),
        t("× baseline"): NONE if times is None else f"{times:.2f}",
        t("fidelity"): t(FIDELITY_NAMES[one.fidelity]) if one.fidelity else NONE,
    }
    if any(other.scores for other in ladder.outcomes):
        change = ladder.change(one)
        points = NONE if change is None else f"{change:{'+.0%' if ladder.is_error else '+.2f'}}"
        cells |= {metric_name(ladder): score_of(one), t("points"): points}
    return cells


def table(ladder: Ladder) -> Table:
    """The table for a terminal of 80 columns."""
    from memfit.report import terminal

    rows = [_cells(ladder, one) for one in ladder.outcomes]
    last = metric_name(ladder) if any(one.scores for one in ladder.outcomes) else t("fidelity")
    heads = [t("rung"), t("shrinks"), t("predicted"), t("measured"), t("epoch"), last]
    made = terminal.table(*heads)
    made.columns[1].justify = "left"
    made.columns[1].max_width = 11
    for column in (made.columns[0], made.columns[2], made.columns[4]):
        column.no_wrap = True
    for one, cells in zip(ladder.outcomes, rows, strict=True):
        cells[last] = cells[last].replace(" ±0", "±")
        made.add_row(*(cells[head] for head in heads), style="red" if ladder.loses(one) else None)
    return made


def markdown(ladder: Ladder) -> str:
    """ladder.md: the whole table and the sentences."""

    def escaped(text: str) -> str:
        # A file name or an error cannot end a cell or start an element.
        for char in "\\|<>`*_[]":
            text = text.replace(char, f"\\{char}")
        return clean(text)

    rows = [_cells(ladder, one) for one in ladder.outcomes]
    heads = list(rows[0])
    marks = ["---", "---", *("---:" for _ in heads[2:])]
    body = [[escaped(cell) for cell in row.values()] for row in rows]
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (heads, marks, *body))
    below = "\n".join(f"- {escaped(line)}" for line in sentences(ladder))
    return f"# {escaped(title(ladder))}\n\n{lines}\n\n{below}\n"


# ---- sentences ----


def _listed(names: Iterable[str]) -> str:
    return t(", ").join(names)


def sentences(ladder: Ladder) -> list[str]:
    """Which rungs cost quality, the strategies of the plans, and what the numbers mean."""
    return [*quality(ladder), *_plans(ladder), *_notes(ladder)]


def quality(ladder: Ladder) -> Iterator[str]:
    """Which rungs cost quality: as measured, or, where it was not, by what they change."""
    others = [one for one in ladder.outcomes if one.rung.name != BASELINE and one.status == OK]
    base, metric = ladder.baseline, metric_name(ladder)
    for one in others:
        if base is None or not ladder.loses(one):
            continue
        change = ladder.change(one) or 0.0
        fields = {"name": name_of(one.rung), "metric": metric, "score": score_of(one),
                  "base": score_of(base),
                  "change": f"{-change:.0%}" if ladder.is_error else f"{change:+.1f}"}  # fmt: skip
        yield t(
            N_("COSTS QUALITY: {name}, {metric} worse by {change} ({score} against {base}).")
            if ladder.is_error
            else N_("COSTS QUALITY: {name}, {change} points of {metric} ({score} against {base})."),
            **fields,
        )
    unmeasured = [
        t("{name} ({why})", name=name_of(one.rung), why=t(_WHY[one.fidelity]))
        for one in others
        if ladder.may_lose(one)
    ]
    if unmeasured:
        yield t(
            "CHANGE WHAT IS LEARNT and may cost quality: {names}. Not measured: add --quality.",
            names=_listed(unmeasured),
        )
    unharmed = [one for one in others if not ladder.loses(one)]
    scored = [name_of(one.rung) for one in unharmed if ladder.change(one) is not None]
    if base is not None and scored:
        seeds, names = len(base.scores), _listed(scored)
        yield t("No loss that {seeds} seeds can see: {names}.", seeds=seeds, names=names)
    rest = [
        name_of(one.rung)
        for one in unharmed
        if ladder.change(one) is None and one.fidelity in HARMLESS
    ]
    if rest:
        names = _listed(rest)
        yield t("Cost no quality (same result up to rounding): {names}.", names=names)


def _plans(ladder: Ladder) -> Iterator[str]:
    """The strategies of every plan, and the reasons of what did not run."""
    from memfit.strategies import title_of

    for one in ladder.outcomes:
        if one.rung.kind == PLAN and one.fidelity:
            names = [shown(title_of(name)) for name in one.strategies]
            made = _listed(names) or t("nothing but micro-batches")
            yield t("{name}: {strategies}", name=name_of(one.rung), strategies=made)
    for one in ladder.outcomes:
        if one.why:
            yield t("{name}: {why}", name=name_of(one.rung), why=clean(one.why))


def _notes(ladder: Ladder) -> Iterator[str]:
    seeds = max((len(one.scores) for one in ladder.outcomes), default=0)
    if seeds:
        yield t(
            "{metric} after {epochs} epochs, mean over {seeds} seeds ± standard deviation.",
            metric=metric_name(ladder),
            epochs=f"{ladder.epochs or 0:g}",
            seeds=seeds,
        )
        if ladder.metric == "f1":
            yield t("Lost means: worse in every seed, and by half a point or more on average.")
    yield t(
        N_("Peaks are of a training step on the longest texts, the CUDA context included.")
        if ladder.device.get("type") == "cuda"
        else N_("Peaks are of a training step on the longest texts, live tensors on the CPU.")
    )
    counts = [one.steps_per_epoch for one in ladder.outcomes if one.step_seconds]
    if counts:
        yield t(
            "An epoch is extrapolated: the median of {steps} timed steps × {count} steps.",
            steps=ladder.steps,
            count=counts[0],
        )
    if ladder.budget_bytes is not None:
        yield t("Every rung was held to {budget}.", budget=format_both(ladder.budget_bytes))
    if any(one.rung.name == "accumulation" for one in ladder.outcomes):
        yield t("Accumulated losses are divided as they should be; the Trainer by itself does not.")
