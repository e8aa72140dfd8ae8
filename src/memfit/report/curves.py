"""What a run logged, as lines over its steps: of one run, or of several over each other."""

from __future__ import annotations

import json
from collections.abc import Mapping

from memfit.i18n import N_, pt, t
from memfit.printing import clean
from memfit.report import plots
from memfit.report.formatting import Picture, named
from memfit.report.view import Points, RunView

_CAPTIONS = {
    "loss": N_("Loss"),
    "train_loss": N_("Training loss"),
    "eval_loss": N_("Validation loss"),
    "metrics": N_("Metrics on the validation rows"),
    "norm": N_("Gradient norm"),
    "speed": N_("Rows trained on a second"),
    "rate": N_("Learning rate"),
}


def curves(view: RunView) -> list[Picture]:
    """Loss, metrics, throughput, gradient norm, learning rate: as many as were logged."""
    if not plots.available():
        return []
    drawn: dict[str, Mapping[str, Points]] = {
        "loss": {t("training"): view.series("loss"), t("validation"): view.series("eval_loss")},
        "metrics": {
            named("metric", name): view.series(f"eval_{name}") for name in view.metric_names
        },
        "speed": {t("rows a second"): view.rows_a_second},
        "norm": {t("Gradient norm"): view.series("grad_norm")},
        "rate": {t("Learning rate"): view.series("learning_rate")},
    }
    # One scale for all, so that an eye finds the same step in each.
    until = max(
        (points[-1][0] for one in drawn.values() for points in one.values() if points), default=0.0
    )
    return [
        picture(
            name,
            t(_CAPTIONS[name]),
            filled,
            epoch_steps=view.steps_per_epoch,
            best_step=view.best_step if name in ("loss", "metrics") else None,
            until=until,
        )
        for name, lines in drawn.items()
        if (filled := {what: points for what, points in lines.items() if points})
    ]


def overlaid(views: Mapping[str, RunView]) -> list[Picture]:
    """The curves of several runs over each other, a colour a run; what only one has is left out.

    Over epochs where an epoch has not as many steps in all of them.
    """
    if not plots.available():
        return []
    epochs = {name: view.steps_per_epoch for name, view in views.items()}
    known = [one for one in epochs.values() if one]
    by_epoch = len(known) == len(epochs) and max(known) > 1.01 * min(known)
    keys = {"train_loss": "loss", "eval_loss": "eval_loss"}
    keys |= {name: f"eval_{name}" for one in views.values() for name in one.metric_names}
    keys |= {"speed": "", "norm": "grad_norm", "rate": "learning_rate"}
    pictures = []
    for name, key in keys.items():
        lines: dict[str, Points] = {}
        for run, view in views.items():
            points = view.series(key) if key else view.rows_a_second
            scale = epochs[run] if by_epoch else None
            lines[run] = [(step / scale, value) for step, value in points] if scale else points
        if sum(bool(points) for points in lines.values()) > 1:
            caption = (
                t(_CAPTIONS[name])
                if name in _CAPTIONS
                else t("{metric} on the validation rows", metric=named("metric", name))
            )
            same = known[0] if len(known) == len(epochs) and not by_epoch else None
            pictures.append(picture(name, caption, lines, epoch_steps=same, by_epoch=by_epoch))
    return pictures


def picture(
    name: str,
    caption: str,
    points: Mapping[str, Points],
    *,
    epoch_steps: float | None = None,
    best_step: int | None = None,
    by_epoch: bool = False,
    until: float = 0.0,
) -> Picture:
    """Lines with their legend; `best_step` has a star, and the axis goes on `until` there."""
    # Numbered before the empty ones go: a run has the same colour in every picture.
    lines = [
        plots.Line(clean(what), found, n) for n, (what, found) in enumerate(points.items()) if found
    ]
    told = [
        t(
            N_("{name}: from {first} at epoch {begin:,} to {last} at epoch {end:,}")
            if by_epoch
            else N_("{name}: from {first} at step {begin:,} to {last} at step {end:,}"),
            name=line.name,
            first=f"{line.points[0][1]:.4g}",
            last=f"{line.points[-1][1]:.4g}",
            begin=_whole(line.points[0][0]),
            end=_whole(line.points[-1][0]),
        )
        for line in lines
    ]
    x_label = pt("axis", "epoch") if by_epoch else t("step")
    chart = plots.line_chart(
        lines,
        name=name,
        label="; ".join([caption, *told]),
        x_label=x_label,
        steps_per_epoch=epoch_steps,
        best=best_step,
        by_epoch=by_epoch,
        until=until,
    )
    keys = [(line.css, line.name) for line in lines] if len(lines) > 1 else []
    if best_step is not None:
        keys.append(("star", t("best checkpoint, step {step:,}", step=best_step)))
    hover = json.dumps({**chart.hover, "by_epoch": by_epoch}, ensure_ascii=False)
    return Picture(chart.svg, caption, keys, hover=hover)


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else round(value, 2)
