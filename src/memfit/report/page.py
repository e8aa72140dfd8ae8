"""One self-contained HTML page about a run: nothing is fetched, everything is escaped.

The page opens from disk and is what `memfit train --watch` serves while the run trains. Its own
script is small, inline and the only one its content security policy lets run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config.files import atomic_writer
from memfit.i18n import chosen_language, language, pt, speaking, t
from memfit.printing import clean
from memfit.records.results import RunFolder, RunSummary
from memfit.report import curves, memory_bar, plots, sections
from memfit.report.formatting import number
from memfit.report.view import RUNNING, RunView, read_view
from memfit.units import format_bytes, format_seconds, percent

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).resolve().parent

LANG_TAGS = {"en": "en", "zh": "zh-Hans"}

REFRESH_SECONDS = 2.0


def write_report(run_dir: str | os.PathLike[str], *, lang: str | None = None) -> Path:
    """Writes report.html from what the run left in its folder, and returns where it is."""
    folder = RunFolder(Path(run_dir))
    html = render(folder, lang=lang)
    with atomic_writer(folder.report) as file:
        file.write(html)
    return folder.report


def render(
    folder: RunFolder, *, live: bool = False, lang: str | None = None, served: bool = False
) -> str:
    """The page as text; a live one asks for itself again for as long as the run trains.

    It speaks `lang`, or what was asked for with --lang, or what the run spoke. `served` pages have
    a box to try a sentence.
    """
    view = read_view(folder, live=live)
    with speaking(_spoken(view, lang)):
        return _page(view, live=live and view.state == RUNNING, served=served)


def spoken(folder: RunFolder, lang: str | None = None) -> str | None:
    """The language of a run's page; None where the environment decides."""
    return _spoken(read_view(folder), lang)


def _spoken(view: RunView, lang: str | None) -> str | None:
    kept = view.summary.language
    return lang or chosen_language() or (kept if kept in LANG_TAGS else None)


def render_waiting(lang: str | None = None) -> str:
    """The page before there is anything to tell."""
    with speaking(lang):
        why = t("The run is getting ready: data and model are being loaded.")
        view = RunView(summary=RunSummary(model="", task=""), state=RUNNING, why=why)
        return _page(view, live=True, path="", training=None, missing="")


def _page(view: RunView, *, live: bool, served: bool = False, **changes: Any) -> str:
    drawn = curves.curves(view)
    missing = t("The run logged nothing to draw.") if not drawn and view.state != RUNNING else ""
    if not plots.available():
        missing = t(
            "The curves are missing: matplotlib is not installed (pip install memfit[report])."
        )
    parts = {
        "title": sections.title(view),
        "state": sections.state(view),
        "path": clean(view.folder.path.absolute()),
        "verdict": sections.verdict(view),
        "view": view,
        "figures": sections.figures(view),
        "trial": {"pairs": bool(view.summary.data.get("text_pair_column"))} if served else None,
        "memory": memory_bar.memory_section(view),
        "curves": drawn,
        "missing": missing,
        "training": sections.training_parts(view),
        "evaluation": sections.quality(view),
        "plan": sections.plan(view),
        "export": sections.export(view),
        "data": sections.data(view),
        "config": "\n".join(clean(line) for line in view.config.splitlines()),
    }
    refresh = int(1000 * REFRESH_SECONDS) if live else 0
    return filled(
        "page.html", reaches_itself=live or served, **{**parts, "refresh": refresh, **changes}
    )


def filled(template: str, *, reaches_itself: bool = False, **values: Any) -> str:
    """A template of this folder with the report's own style, script and policy."""
    from markupsafe import Markup

    script = own_file("page.js")
    return fill(
        template,
        css=Markup(plots.palette_css() + own_file("page.css")),
        script=Markup(script),
        policy=policy(script, reaches_itself=reaches_itself),
        **values,
    )


def fill(template: str, **values: Any) -> str:
    """A template of this folder; all is escaped but what is `Markup` and what is `drawn`."""
    from markupsafe import Markup

    shared = {
        "drawn": Markup, "t": t, "pt": pt, "lang": LANG_TAGS[language()], "clean": clean,
        "number": number, "bytes": format_bytes, "seconds": format_seconds, "quoted": shlex.quote,
        "percent": percent,
    }  # fmt: skip
    return _templates().get_template(template).render(**shared, **values)


@functools.cache
def _templates() -> Environment:
    """This folder's templates; each is compiled once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)


def own_file(name: str) -> str:
    """A file beside this one, with the line ends it is hashed with."""
    return (HERE / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def policy(script: str, *, reaches_itself: bool) -> str:
    """What the page may do: show itself, run this one script, and ask for itself again."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    reach = "'self'" if reaches_itself else "'none'"
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; connect-src {reach}; base-uri 'none'; form-action 'none'"
    )
