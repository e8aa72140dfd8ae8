"""The runs of several datasets as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from memfit.messages import t
from memfit.report.terminal import metric, shorten, status_name, table
from memfit.report.values import named
from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.many import ManyResult, Outcome

_MOST_METRICS = 2


def datasets_table(result: ManyResult) -> RenderableType:
    """One row a dataset; the metrics are those most of them have."""
    names = _metrics(result)
    heads = [t("dataset"), t("rows"), t("time"), t("memory"), t("status")]
    shown = table(*heads[:2], *(named("metric", one) for one in names), *heads[2:])
    for one in result.outcomes:
        shown.add_row(
            Text(shorten(one.name, 24)),
            "–" if one.rows is None else f"{one.rows:,}",
            *(metric(one.metrics.get(name)) for name in names),
            "–" if one.seconds is None else format_seconds(one.seconds),
            "–" if one.device_peak_bytes is None else format_bytes(one.device_peak_bytes),
            _status(one),
        )
    return shown


def _metrics(result: ManyResult) -> list[str]:
    counts: dict[str, int] = {}
    for one in result.outcomes:
        for name in one.metrics:
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])[:_MOST_METRICS]


def _status(outcome: Outcome) -> Text:
    said = status_name(outcome.status)
    return Text(said, style="red" if outcome.status == "failed" else "")
