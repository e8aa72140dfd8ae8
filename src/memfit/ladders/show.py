"""The ladder for people: a table at 80 columns, Markdown, sentences, and a picture.

Drawn for paper and screens alike, dark on white. Chinese needs a font that has it: where the
machine has none the PNG speaks English, and the SVG takes the reader's fonts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config.schema import FIDELITY_NAMES
from memfit.i18n import N_, NP_, language, shown, speaking, t
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
from memfit.memory.components import Component, MemoryPeak
from memfit.printing import clean
from memfit.report.plots import INK, LIGHT, PAPER, RULE, STYLE, UNUSED, available
from memfit.units import GIB, MIB, format_both, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

METRICS = {"f1": "F1", "mse": "MSE"}

NONE = "–"

_HEADS = (N_("rung"), N_("shrinks"), N_("predicted"), N_("measured"), N_("epoch"))

_RUNGS = {
    "baseline": N_("baseline, batch {rows}"),
    "accumulation": N_("+ batch 1 × {rows}"),
    "checkpointing": N_("+ checkpointing"),
    "adafactor": N_("+ Adafactor"),
    "frozen": N_("+ frozen encoder"),
    "tuned": N_("+ head at {rate}"),
    "shorter": N_("+ length {tokens}"),
    "plan": N_("memfit in {budget}"),
    "plan.auto": N_("memfit unlimited"),
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
    "workspace": N_("workspaces"),
    "context": N_("CUDA context"),
    "unused": NP_("ladder", "reserved, unused"),
}
"""Components of memory as the ladder names them."""

_WHY = {
    "optimizer": N_("another update rule"),
    "capacity": N_("fewer weights learn"),
    "data": N_("texts are cut"),
}


def name_of(rung: Rung) -> str:
    """A rung in the reader's language."""
    if rung.kind == PLAN:
        if rung.budget == AUTO:
            return t("memfit unlimited")
        return t("memfit in {budget}", **rung.words)
    return t(_RUNGS[rung.name], **rung.words)


def metric_name(ladder: Ladder) -> str:
    """The metric's name as people write it."""
    return METRICS.get(ladder.metric, ladder.metric)


def in_short(outcome: RungOutcome) -> str:
    """What came of a rung, in a few words for the line that announced it."""
    if outcome.status != OK or outcome.measured is None:
        return t(_STATUSES[outcome.status]) if outcome.status != OK else NONE
    return t("{peak}, an epoch in {epoch}", peak=_bytes(outcome.measured), epoch=_epoch(outcome))


# ---- cells ----


def _bytes(peak: MemoryPeak | None) -> str:
    return NONE if peak is None else format_bytes(peak.device_bytes)


def _measured(outcome: RungOutcome) -> str:
    if outcome.status == OK:
        return _bytes(outcome.measured)
    return t(_STATUSES[outcome.status])


def _epoch(outcome: RungOutcome) -> str:
    seconds = outcome.epoch_seconds if outcome.status == OK else None
    return NONE if seconds is None else format_seconds(seconds)


def _fidelity(outcome: RungOutcome) -> str:
    return t(FIDELITY_NAMES[outcome.fidelity]) if outcome.fidelity else NONE


def _targets(outcome: RungOutcome) -> str:
    return ", ".join(t(PARTS[one]) for one in outcome.rung.targets) or NONE


def score_of(outcome: RungOutcome) -> str:
    """0.916 ±0.003; without the spread of one seed."""
    if outcome.score is None:
        return NONE
    spread = "" if outcome.spread is None else f" ±{outcome.spread:.3f}"
    return f"{outcome.score:.3f}{spread}"


def _error(outcome: RungOutcome) -> str:
    if outcome.predicted is None or outcome.measured is None:
        return NONE
    return f"{outcome.predicted.device_bytes / outcome.measured.device_bytes - 1:+.1%}"


# ---- the table in the terminal ----


def table(ladder: Ladder) -> Table:
    """One row a rung, at most 80 columns wide."""
    from memfit.report import terminal

    with_scores = any(one.scores for one in ladder.outcomes)
    heads = [t(one) for one in _HEADS]
    last = metric_name(ladder) if with_scores else t("fidelity")
    made = terminal.table(*heads, last)
    made.columns[1].justify = "left"
    made.columns[1].max_width = 11
    for column in (made.columns[0], made.columns[2], made.columns[4]):
        column.no_wrap = True
    for one in ladder.outcomes:
        result = score_of(one).replace(" ±0", "±") if with_scores else _fidelity(one)
        style = "red" if ladder.loses(one) else None
        cells = (_bytes(one.predicted), _measured(one), _epoch(one), result)
        made.add_row(name_of(one.rung), _targets(one), *cells, style=style)
    return made


# ---- sentences ----


def sentences(ladder: Ladder) -> list[str]:
    """What costs quality, what the plans are made of, what the numbers are."""
    return [*quality(ladder), *_plans(ladder), *_reasons(ladder), *_notes(ladder)]


def quality(ladder: Ladder) -> Iterator[str]:
    """Which rungs cost quality: measured where it was, by what they change where it was not."""
    others = [one for one in ladder.outcomes if one.rung.name != BASELINE and one.status == OK]
    base = ladder.baseline
    metric = metric_name(ladder)
    for one in others:
        change = ladder.change(one)
        if base is not None and change is not None and ladder.loses(one):
            fields = {"name": name_of(one.rung), "metric": metric, "score": score_of(one)}
            if ladder.metric == "mse":
                share = f"{-change:.0%}"
                yield t(
                    "COSTS QUALITY: {name}, {metric} worse by {change} ({score} against {base}).",
                    **fields,
                    change=share,
                    base=score_of(base),
                )
            else:
                yield t(
                    "COSTS QUALITY: {name}, {change} points of {metric} ({score} against {base}).",
                    **fields,
                    change=f"{change:+.1f}",
                    base=score_of(base),
                )
    unmeasured = [one for one in others if ladder.may_lose(one)]
    if unmeasured:
        named = [
            t("{name} ({why})", name=name_of(one.rung), why=t(_WHY[one.fidelity]))
            for one in unmeasured
        ]
        yield t(
            "CHANGE WHAT IS LEARNT and may cost quality: {names}. Not measured: add --quality.",
            names=_listed(named),
        )
    kept = [one for one in others if ladder.change(one) is not None and not ladder.loses(one)]
    if kept:
        seeds = len(base.scores) if base is not None else 0
        names = _listed(name_of(one.rung) for one in kept)
        yield t("No loss that {seeds} seeds can see: {names}.", seeds=seeds, names=names)
    rest = [one for one in others if one not in kept and one.fidelity in HARMLESS]
    rest = [one for one in rest if not ladder.loses(one)]
    if rest:
        yield t(
            "Cost no quality (same result up to rounding): {names}.",
            names=_listed(name_of(one.rung) for one in rest),
        )


def _listed(names: Iterable[str]) -> str:
    return t(", ").join(names)


def _plans(ladder: Ladder) -> Iterator[str]:
    for one in ladder.outcomes:
        if one.rung.kind == PLAN and one.fidelity:
            from memfit.strategies import called

            names = [shown(called(name)) for name in one.strategies]
            made = _listed(names) or t("nothing but micro-batches")
            yield t("{name}: {strategies}", name=name_of(one.rung), strategies=made)


def _reasons(ladder: Ladder) -> Iterator[str]:
    for one in ladder.outcomes:
        if one.why:
            yield t("{name}: {why}", name=name_of(one.rung), why=clean(one.why))


def _notes(ladder: Ladder) -> Iterator[str]:
    scored = [one for one in ladder.outcomes if one.scores]
    if scored:
        yield t(
            "{metric} after {epochs} epochs, mean over {seeds} seeds ± standard deviation.",
            metric=metric_name(ladder),
            epochs=f"{ladder.epochs or 0:g}",
            seeds=max(len(one.scores) for one in scored),
        )
        if ladder.metric == "f1":
            yield t("Lost means: worse in every seed, and by half a point or more on average.")
    yield t(
        N_("Peaks are of a training step on the longest texts, the CUDA context included.")
        if ladder.on_cuda
        else N_("Peaks are of a training step on the longest texts, live tensors on the CPU.")
    )
    timed = [one for one in ladder.outcomes if one.step_seconds]
    if timed:
        count = timed[0].steps_per_epoch
        yield t(
            "An epoch is extrapolated: the median of {steps} timed steps × {count} steps.",
            steps=ladder.steps,
            count=count,
        )
    if ladder.budget_bytes is not None:
        yield t("Every rung was held to {budget}.", budget=format_both(ladder.budget_bytes))
    if any(one.rung.name == "accumulation" for one in ladder.outcomes):
        yield t("Accumulated losses are divided as they should be; the Trainer by itself does not.")


def title(ladder: Ladder) -> str:
    """What was climbed, where."""
    name = Path(ladder.model).name
    device = ladder.device.get("name") or NONE
    return t(
        "{model} on {device}, {rows} rows",
        model=clean(name),
        device=clean(device),
        rows=f"{ladder.rows:,}",
    )


# ---- Markdown ----


def markdown(ladder: Ladder) -> str:
    """ladder.md: everything the table has no room for as well."""
    scored = any(one.scores for one in ladder.outcomes)
    rung, targets, predicted, measured, epoch = (t(one) for one in _HEADS)
    heads_said = [
        rung,
        targets,
        predicted,
        measured,
        t("off by"),
        epoch,
        t("× baseline"),
        t("fidelity"),
    ]
    if scored:
        heads_said += [metric_name(ladder), t("points")]
    rows = [[_cell(cell) for cell in _markdown_row(ladder, one, scored)] for one in ladder.outcomes]
    marks = ["---", "---", *("---:" for _ in heads_said[2:])]
    lines = [f"| {' | '.join(line)} |" for line in (heads_said, marks, *rows)]
    said = "\n".join(f"- {_cell(line)}" for line in sentences(ladder))
    return f"# {_cell(title(ladder))}\n\n" + "\n".join(lines) + f"\n\n{said}\n"


def _markdown_row(ladder: Ladder, one: RungOutcome, scored: bool) -> list[str]:
    times = ladder.slowdown(one) if one.status == OK else None
    cells = [
        name_of(one.rung), _targets(one), _bytes(one.predicted), _measured(one),
        _error(one) if one.status != DOES_NOT_FIT else NONE, _epoch(one),
        NONE if times is None else f"{times:.2f}", _fidelity(one),
    ]  # fmt: skip
    if scored:
        change = ladder.change(one)
        share = ladder.metric == "mse"
        points = NONE if change is None else f"{change:+.0%}" if share else f"{change:+.2f}"
        cells += [score_of(one), points]
    return cells


def _cell(text: str) -> str:
    """A file name or an error cannot end a cell or start an element."""
    for char in "\\|<>`*_[]":
        text = text.replace(char, f"\\{char}")
    return clean(text)


# Fonts with Chinese, as systems bring them.
CHINESE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Microsoft YaHei", "PingFang SC",
    "SimHei", "WenQuanYi Zen Hei", "Hiragino Sans GB", "Heiti SC", "Noto Sans CJK JP",
)  # fmt: skip

_WIDTH_INCHES, _ROW_INCHES = 9.0, 0.42

_REAL = {INK: LIGHT["ink"], RULE: LIGHT["rule"], PAPER: LIGHT["paper"]}

_TEXT = LIGHT["ink"]


def draw_ladder(ladder: Ladder, folder: Path) -> list[Path]:
    """ladder.png and ladder.svg; nothing where matplotlib is missing."""
    if not available():
        return []
    font = chinese_font()
    written = []
    for ending, spoken in (("png", None if font or language() == "en" else "en"), ("svg", None)):
        path = folder / f"ladder.{ending}"
        with speaking(spoken):
            _write(ladder, path, font)
        written.append(path)
    return written


def chinese_font() -> str | None:
    """A font of this machine that has Chinese."""
    from matplotlib.font_manager import fontManager

    there = {font.name for font in fontManager.ttflist}
    return next((name for name in CHINESE_FONTS if name in there), None)


def _style(font: str | None) -> Any:
    style: dict[str, Any] = {key: _REAL.get(value, value) for key, value in STYLE.items()}
    families = ["DejaVu Sans", *([font] if font else [])]
    return {
        **style, "font.family": families, "axes.unicode_minus": False, "svg.hashsalt": "ladder",
        "axes.grid.axis": "x",
    }  # fmt: skip


def _write(ladder: Ladder, path: Path, font: str | None) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    height = 1.5 + _ROW_INCHES * len(ladder.outcomes)
    with rc_context(_style(font)), warnings.catch_warnings():
        # A name in a script no font here has: boxes in the picture, never a failed ladder.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained", facecolor="white")
        axes = figure.subplots()
        _fill(axes, ladder)
        name = clean(Path(ladder.model).name).replace("$", r"\$")
        figure.suptitle(
            t("Peak memory and time of an epoch, {model}", model=name),
            x=0.01,
            ha="left",
            fontsize=12,
            color=_TEXT,
        )
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=144, metadata=metadata)
    if path.suffix == ".svg":
        # The reader may have none of the fonts of this machine.
        text = path.read_text(encoding="utf-8")
        families = "'DejaVu Sans', " + ", ".join(f"'{one}'" for one in CHINESE_FONTS)
        text = text.replace("'DejaVu Sans'", f"{families}, sans-serif")
        path.write_text(text, encoding="utf-8")


def _fill(axes: Any, ladder: Ladder) -> None:
    highest = max([_most(one) for one in ladder.outcomes] + [ladder.budget_bytes or 0, 1])
    unit_bytes, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    shown: dict[str, Any] = {}
    for row, one in enumerate(ladder.outcomes):
        begun = 0.0
        for part, size in _parts(one.measured).items():
            if size > 0:
                bar = axes.barh(row, size / unit_bytes, left=begun, height=0.62, color=LIGHT[part])
                shown.setdefault(part, bar)
                begun += size / unit_bytes
        if one.predicted is not None:
            at = one.predicted.device_bytes / unit_bytes
            (tick,) = axes.plot([at, at], [row - 0.42, row + 0.42], color=_TEXT, linewidth=2.2)
            shown.setdefault("tick", tick)
        axes.annotate(
            _said(ladder, one), (1.01, row), xycoords=("axes fraction", "data"), va="center"
        )
    if ladder.budget_bytes is not None:
        axes.axvline(ladder.budget_bytes / unit_bytes, color=LIGHT["bad"], linestyle="--")
    axes.set_yticks(range(len(ladder.outcomes)), [name_of(one.rung) for one in ladder.outcomes])
    axes.set_ylim(len(ladder.outcomes) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * highest / unit_bytes)
    axes.set_xlabel(unit)
    order = [part for part in (*map(str, Component), UNUSED, "tick") if part in shown]
    names = [t("predicted") if one == "tick" else t(PARTS[one]) for one in order]
    axes.legend(
        [shown[one] for one in order], names, loc="upper left", bbox_to_anchor=(-0.02, -0.14),
        ncols=len(order), handlelength=1.0, columnspacing=1.2, borderaxespad=0.0,
    )  # fmt: skip


def _said(ladder: Ladder, one: RungOutcome) -> str:
    """Beside the bar: what it took, or why there is none."""
    if one.status != OK or one.measured is None or one.epoch_seconds is None:
        return in_short(one)
    words = in_short(one)
    return words if one.score is None else f"{words}; {metric_name(ladder)} {one.score:.3f}"


def _most(one: RungOutcome) -> int:
    return max(
        (peak.device_bytes for peak in (one.predicted, one.measured) if peak is not None), default=0
    )


def _parts(peak: MemoryPeak | None) -> Mapping[str, int]:
    """By component, and what the allocator holds beyond them."""
    if peak is None:
        return {}
    parts = {str(name): size for name, size in peak.components.items() if size > 0}
    return {**parts, UNUSED: peak.device_bytes - sum(parts.values())}
