"""What memfit's objects look like in a notebook: `_repr_html_` calls `notebook_html`.

    class BudgetTrainer:
        def _repr_html_(self) -> str:
            from memfit.report.notebook import notebook_html

            return notebook_html(self)

Plans are below the report: importing this module registers `notebook_html` for them.

A part of somebody else's page: no script, no style beyond its own class, the notebook's own text
colour. Objects are told apart by what they have, since the report knows neither the runtime nor
the planner: a result (`output_dir`, `summary`), a trainer (`state`, `micro_batching`), a plan
(`strategies`, `sentences`), a comparison (`runs`, `cautions`), a summary.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from memfit.i18n import language, pt, t
from memfit.memory.components import MemoryPeak
from memfit.planner.plans import draw_plans_with
from memfit.printing import clean
from memfit.records.results import MemorySummary, RunFolder, RunSummary
from memfit.report import curves, memory_bar, plots, sections
from memfit.report import sections as quality
from memfit.report.formatting import PageTable, Picture, number
from memfit.report.page import HERE, LANG_TAGS, own_file
from memfit.report.story import FINISHED, Story, plan_from_tables, read_story

# JupyterLab, VS Code and Colab each say in their own way that it is night.
_NIGHTS = ('[data-jp-theme-light="false"]', ".vscode-dark", "html[theme=dark]")


def notebook_html(thing: Any) -> str:
    """The HTML of a result, a summary, a trainer or a plan."""
    if isinstance(thing, RunSummary):
        return _summary(thing)
    if hasattr(thing, "output_dir") and hasattr(thing, "summary"):
        return _result(thing)
    if hasattr(thing, "micro_batching") and hasattr(thing, "state"):
        return _trainer(thing)
    if hasattr(thing, "strategies") and hasattr(thing, "sentences"):
        return _plan(thing)
    if hasattr(thing, "runs") and hasattr(thing, "cautions"):
        return _comparison(thing)
    raise TypeError(f"nothing is known about how to show a {type(thing).__name__}")


def _result(result: Any) -> str:
    folder = RunFolder(Path(result.output_dir))
    story = read_story(folder)
    evaluated = quality.quality_section(*story.evaluated) if story.evaluated else None
    return _filled(
        title=sections.title(story),
        state=sections.state(story),
        warnings=sections.run_warnings(story.summary),
        figures=sections.figures(story.summary),
        verdicts=memory_bar.verdicts(story.summary.memory),
        pictures=_pictures(story),
        matrix=evaluated["matrix"] if evaluated else None,
        tables=[evaluated["classes"]] if evaluated and evaluated["classes"] else [],
        note=t("The whole report: {path}", path=clean(folder.report)),
    )


def _summary(summary: RunSummary) -> str:
    story = Story(folder=RunFolder(Path()), summary=summary, state=summary.status)
    return _filled(
        title=sections.title(story),
        state=sections.state(story) if summary.status == FINISHED else None,
        warnings=sections.run_warnings(summary),
        figures=sections.figures(summary),
        verdicts=memory_bar.verdicts(summary.memory),
        pictures=_pictures(story),
        tables=[sections.training(summary)],
    )


def _trainer(trainer: Any) -> str:
    """A BudgetTrainer: how far it is, what is on the device at once, its curves."""
    state = trainer.state
    limits = trainer.micro_batching
    words = [
        f"{count:,} {what}"
        for count, what in (
            (limits.max_rows, t("rows")),
            (limits.max_tokens, t("tokens")),
        )
        if count is not None
    ]
    rows = [
        (
            t("steps"),
            # Before it starts a Trainer counts none.
            f"{state.global_step:,} / {state.max_steps:,}"
            if state.max_steps
            else t("not started yet"),
        ),
        (t("effective batch"), number(getattr(trainer, "effective_rows", None))),
        (pt("notebook", "on the device at once"), ", ".join(words) or t("the whole batch")),
    ]
    summary = RunSummary(model=str(getattr(trainer.model, "name_or_path", "")), task="")
    story = Story(
        folder=RunFolder(Path()), summary=summary, state="", history=list(state.log_history)
    )
    name = clean(Path(summary.model).name)
    title = t("BudgetTrainer")
    return _filled(
        title=f"{title}: {name}" if name else title,
        pictures=_pictures(story),
        tables=[PageTable("", rows)],
    )


def _plan(plan: Any) -> str:
    """A plan: what it does and why, and its predicted peak against the budget."""
    said = plan.sentences(language())
    decisions = [
        (getattr(one, "strategy", "") or getattr(one, "message", str(index)), sentence)
        for index, (one, sentence) in enumerate(zip(plan.decisions, said, strict=True))
    ]
    settings = {one.name: _settings(one) for one in plan.strategies}
    shown = plan_from_tables(
        {"fidelity": str(plan.fidelity), "strategies": settings, "reasons": dict(decisions)}
    )
    price = getattr(plan, "price", None)
    peak: MemoryPeak | None = getattr(price, "peak", None)
    budget = getattr(getattr(plan, "digest", None), "budget_bytes", None)
    summary = RunSummary(model="", task="", memory=MemorySummary(budget, peak))
    story = Story(
        folder=RunFolder(Path()),
        summary=summary,
        state="",
        plan=dataclasses.replace(shown, step_seconds=getattr(price, "step_seconds", None)),
    )
    made = sections.plan(story)
    assert made is not None
    return _filled(
        title=pt("heading", "Plan"),
        verdicts=memory_bar.verdicts(summary.memory),
        pictures=_pictures(story),
        tables=[one for one in (made["strategies"], made["facts"]) if one is not None],
        reasons=made["reasons"],
    )


def _comparison(compared: Any) -> str:
    """Runs beside each other: a table a section, and their curves over each other."""
    names = [clean(name) for name in compared.runs]
    return _filled(
        title=", ".join(names),
        verdicts=[(sentence, True) for sentence in compared.cautions()],
        pictures=curves.overlaid(compared.runs) if plots.available() else [],
        tables=[
            PageTable("", [(row.name, *row.cells) for row in rows], ["", *names])
            for rows in compared.sections().values()
        ],
    )


def _settings(strategy: Any) -> dict[str, Any]:
    values = {one.name: getattr(strategy, one.name) for one in dataclasses.fields(strategy)}
    return {name: value for name, value in values.items() if value is not None}


def _pictures(story: Story) -> list[Picture]:
    if not plots.available():
        return []
    memory = story.summary.memory
    drawn = [memory_bar.peak_bars(memory)] if memory_bar.known_peaks(memory) else []
    drawn += [memory_bar.over_time(story)] if story.samples else []
    return [*drawn, *curves.curves(story)]


def _filled(**values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined
    )
    nothing: dict[str, Any] = {
        "state": None, "warnings": [], "figures": [], "verdicts": [], "pictures": [],
        "matrix": None, "tables": [], "reasons": [], "note": "",
    }  # fmt: skip
    palette = plots.scoped_palette_css(".memfit-view", *_NIGHTS)
    return environment.get_template("notebook.html").render(
        css=Markup(palette + own_file("notebook.css")),
        drawn=Markup,
        t=t,
        lang=LANG_TAGS[language()],
        **{**nothing, **values},
    )


draw_plans_with(notebook_html)
