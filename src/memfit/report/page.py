"""One self-contained HTML page about a run: no scripts, nothing fetched, everything escaped."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.files import atomic_writer
from memfit.report import plots, sections
from memfit.report.terminal import METRIC_NAMES
from memfit.results import RunFolder, RunSummary, read_evaluation, read_summary
from memfit.safe_text import clean

_HERE = Path(__file__).resolve().parent
# What the Trainer logs after an evaluation that is about the machine, not the model.
_NOT_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second")


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes report.html from what the run left in its folder, and says where it is."""
    folder = RunFolder(Path(run_dir))
    html = render(folder)
    with atomic_writer(folder.report) as file:
        file.write(html)
    return folder.report


def render(folder: RunFolder) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    summary = read_summary(folder.path)
    evaluated = read_evaluation(folder.path)
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined
    )
    drawn = _plots(summary, folder.log_history())
    return environment.get_template("page.html").render(
        # The style sheet and the drawings are our own; all else is escaped.
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        plots={
            "training": [Markup(svg) for svg in drawn["training"]],
            "lengths": Markup(drawn["lengths"]),
            "missing": drawn["missing"],
        },
        title=f"{clean(Path(summary.model).name or summary.model)}, fine-tuned",
        lead=sections.lead(summary),
        figures=sections.figures(summary),
        memory=sections.memory(summary),
        training=sections.training(summary),
        evaluation=sections.evaluation(*evaluated) if evaluated else None,
        data=sections.data(summary),
        usage=sections.usage(folder.path),
        made_with=sections.made_with(summary),
        config=_config(folder),
    )


def _config(folder: RunFolder) -> str:
    if not folder.config.is_file():
        return ""
    return "\n".join(clean(line) for line in folder.config.read_text(encoding="utf-8").splitlines())


def _plots(summary: RunSummary, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not plots.available():
        missing = (
            "The curves are missing: matplotlib is not installed (pip install memfit[report])."
        )
        return {"training": [], "lengths": "", "missing": missing}
    losses = {
        "training": series(history, "loss"),
        "validation": series(history, "eval_loss"),
    }
    metrics = {
        METRIC_NAMES.get(name, name): series(history, f"eval_{name}")
        for name in metric_names(history)
    }
    rates = {"learning rate": series(history, "learning_rate")}
    drawings = [
        plots.curves(filled, title=title)
        for title, lines in (
            ("Loss", losses),
            ("Metrics on the validation rows", metrics),
            ("Learning rate", rates),
        )
        if (filled := {name: points for name, points in lines.items() if points})
    ]
    bins = [
        (item["first_tokens"], item["last_tokens"], item["rows"])
        for item in summary.lengths.get("histogram") or ()
    ]
    lengths = (
        plots.histogram(bins, title="Length of the texts", mark=summary.lengths.get("max_length"))
        if bins
        else ""
    )
    missing = "" if drawings else "The run logged nothing to draw."
    return {"training": drawings, "lengths": lengths, "missing": missing}


def series(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) for each time a value was logged and is a number."""
    return [
        (entry["step"], float(entry[key]))
        for entry in history
        if isinstance(entry.get(key), (int, float))
        and "step" in entry
        and math.isfinite(entry[key])
    ]


def metric_names(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics among what was logged, in the order of their first appearance, four at most."""
    names = (
        key.removeprefix("eval_") for entry in history for key in entry if key.startswith("eval_")
    )
    return [name for name in dict.fromkeys(names) if name not in _NOT_METRICS][:4]
