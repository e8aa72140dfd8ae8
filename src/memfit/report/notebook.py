"""What memfit's objects look like in a notebook: `_repr_html_` calls `notebook_html`.

    class BudgetTrainer:
        def _repr_html_(self) -> str:
            from memfit.report.notebook import notebook_html

            return notebook_html(self)

Plans are below the report: importing this module registers `notebook_html` for them.

A part of somebody else's page: no script, no style beyond its own class, the notebook's own text
colour. Objects are told apart by what they have, since the report knows neither the runtime nor
the planner: a result (`output_dir`, `summary`), a trainer (`state`, `micro_batching`), a plan
(`strategies`, `decisions`), a comparison (`runs`, `cautions`), a summary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memfit.i18n import pt, t
from memfit.planner.plan import draw_plans_with
from memfit.printing import clean
from memfit.records.results import MemorySummary, RunFolder, RunSummary
from memfit.report import curves, memory_bar, plots, sections
from memfit.report.formatting import PageTable, number
from memfit.report.page import fill, own_file
from memfit.report.view import RunView, plan_from_tables, read_view

# JupyterLab, VS Code and Colab each say in their own way that it is night.
_NIGHTS = ('[data-jp-theme-light="false"]', ".vscode-dark", "html[theme=dark]")


def notebook_html(thing: Any) -> str:
    """The HTML of a result, a summary, a trainer, a plan or a comparison."""
    if isinstance(thing, RunSummary):
        view = RunView(summary=thing, state=thing.status)
        return _run(view, tables=[sections.training(view)])
    if hasattr(thing, "output_dir") and hasattr(thing, "summary"):
        view = read_view(RunFolder(Path(thing.output_dir)))
        evaluated = sections.quality(view) or {"matrix": None, "classes": None}
        return _run(
            view,
            matrix=evaluated["matrix"],
            tables=[evaluated["classes"]] if evaluated["classes"] else [],
            note=t("The whole report: {path}", path=clean(view.folder.report)),
        )
    if hasattr(thing, "micro_batching") and hasattr(thing, "state"):
        return _trainer(thing)
    if hasattr(thing, "strategies") and hasattr(thing, "decisions"):
        return _plan(thing)
    if hasattr(thing, "runs") and hasattr(thing, "cautions"):
        names = [clean(name) for name in thing.runs]
        return _filled(
            title=", ".join(names),
            verdicts=[(sentence, True) for sentence in thing.cautions()],
            pictures=curves.overlaid(thing.runs),
            tables=[
                PageTable("", [(row.name, *row.cells) for row in rows], ["", *names])
                for rows in thing.sections().values()
            ],
        )
    raise TypeError(f"nothing is known about how to show a {type(thing).__name__}")


def _run(view: RunView, **values: Any) -> str:
    """A run that has ended, or its summary alone."""
    return _filled(
        view,
        title=sections.title(view),
        state=sections.state(view),
        warnings=view.summary.warnings,
        figures=sections.figures(view),
        **values,
    )


def _trainer(trainer: Any) -> str:
    """A BudgetTrainer: how far it is, what is on the device at once, its curves."""
    state, limits = trainer.state, trainer.micro_batching
    known = {t("rows"): limits.max_rows, t("tokens"): limits.max_tokens}
    words = [f"{count:,} {what}" for what, count in known.items() if count is not None]
    # Before it starts a Trainer counts none.
    steps = f"{state.global_step:,} / {state.max_steps:,}" if state.max_steps else ""
    rows = [
        (t("steps"), steps or t("not started yet")),
        (t("effective batch"), number(getattr(trainer, "effective_rows", None))),
        (pt("notebook", "on the device at once"), ", ".join(words) or t("the whole batch")),
    ]
    model = str(getattr(trainer.model, "name_or_path", ""))
    view = RunView(summary=RunSummary(model=model, task=""), history=list(state.log_history))
    name = clean(Path(model).name)
    title = t("BudgetTrainer") + (f": {name}" if name else "")
    return _filled(view, title=title, tables=[PageTable("", rows)])


def _plan(plan: Any) -> str:
    """A plan: what it does and why, and its predicted peak against the budget."""
    tables, price = plan.as_json(), plan.price
    memory = MemorySummary(plan.digest.budget_bytes, price.peak if price is not None else None)
    view = RunView(
        summary=RunSummary(model="", task="", memory=memory),
        plan=plan_from_tables({**tables, "reasons": plan.messages(), "predicted": tables}),
    )
    made = sections.plan(view)
    assert made is not None
    return _filled(
        view,
        title=pt("heading", "Plan"),
        tables=[one for one in (made["strategies"], made["facts"]) if one is not None],
        reasons=made["reasons"],
    )


def _filled(view: RunView | None = None, **values: Any) -> str:
    """The template with what is given, and the peaks and curves of the view."""
    from markupsafe import Markup

    shown: dict[str, Any] = {
        "state": None, "warnings": [], "figures": [], "matrix": None, "tables": [], "reasons": [],
        "note": "",
    }  # fmt: skip
    if view is not None:
        shown["verdicts"] = memory_bar.verdicts(view)
        shown["pictures"] = [*memory_bar.pictures(view), *curves.curves(view)]
    palette = plots.scoped_palette_css(".memfit-view", *_NIGHTS)
    css = Markup(palette + own_file("notebook.css"))
    return fill("notebook.html", css=css, **{**shown, **values})


draw_plans_with(notebook_html)
