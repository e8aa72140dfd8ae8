"""The model card: what the model does, what it learned from, how good it is, what it cost.

It speaks the language of who uploads; metadata, and the line that tells it was made, stay.

It is made of counts and figures. Texts of the data, local paths and file names are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.config.files import read_json
from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, pt, t
from memfit.printing import clean
from memfit.records.results import RunFolder
from memfit.report import memory_bar, sections
from memfit.report.formatting import averaging_sentence, metric, named, number, together
from memfit.report.view import RunView, read_view
from memfit.units import format_both, format_seconds

# https://huggingface.co/docs/hub/repositories-licenses; those that carry a model's own name left
# out but for the most common.
LICENCES = (
    "apache-2.0", "mit", "openrail", "bigscience-openrail-m", "creativeml-openrail-m",
    "bigscience-bloom-rail-1.0", "bigcode-openrail-m", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd",
    "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "c-uda", "cc", "cc0-1.0", "cc-by-2.0",
    "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0",
    "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0",
    "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cdla-sharing-1.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0",
    "etalab-2.0", "eupl-1.1", "eupl-1.2", "agpl-3.0", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "lgpl",
    "lgpl-2.1", "lgpl-3.0", "isc", "h-research", "intel-research", "lppl-1.3c", "ms-pl", "mpl-2.0",
    "odc-by", "odbl", "openrail++", "osl-3.0", "postgresql", "ofl-1.1", "ncsa", "unlicense", "zlib",
    "pddl", "deepfloyd-if-license", "fair-noncommercial-research-license", "llama2", "llama3",
    "llama3.1", "llama3.2", "llama3.3", "llama4", "gemma", "apple-amlr", "unknown", "other",
)  # fmt: skip

COMMON = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other")


def checked_licence(licence: str | None) -> str:
    """The licence as the hubs spell it; a model without one may not be used by anybody."""
    if licence is None or not licence.strip():
        raise ConfigError(
            "no licence given; name one with --licence, for instance --licence {first} (or "
            "{others})",
            first=COMMON[0],
            others=", ".join(COMMON[1:]),
        )
    known = licence.strip().lower().replace(" ", "-")
    if known not in LICENCES:
        hint = nearest(known, LICENCES)
        raise ConfigError(
            "--licence is {name}, which the hubs do not know.{hint} Write other for one of "
            "your own",
            name=repr(licence),
            hint=hint,
        )
    return known


_WEAK_RECALL = 0.5

_MOST_WEAK = 5
"""How many rarely found classes are named."""

_MADE_BY_TRAINER = "generated automatically according to the information the Trainer had access to"

_MADE_BY_MEMFIT = "Trained and uploaded with memfit"

_TRAINING = (
    "parameters", "learning_parameters", "epochs", "steps", "effective_batch", "learning_rate",
    "optim", "seed", "best_by", "class_weights", "threshold", "early_stopping",
)  # fmt: skip
"""Facts of a training that hold no path and no text."""

_COUNTS = {
    "train_rows": N_("rows to train on"),
    "validation_rows": N_("rows to validate on"),
    "dropped": N_("rows left out, without text or label"),
    "duplicates_across_split": N_("validation texts also in training"),
    "contradicting_rows": N_("rows whose text has another label too"),
    "cut_rows": N_("texts that lost their end"),
}


@dataclass(frozen=True, slots=True)
class AuthorsWords:
    """What no figure tells; sections without words are left to fill in."""

    intended_use: str = ""
    limitations: str = ""


def card_for(
    folder: Path, repo: str, licence: str | None, to: str, words: AuthorsWords | None = None
) -> str:
    """The README.md somebody wrote into the folder, or one made from the run's figures."""
    own = _own_card(folder)
    if own is None:
        return model_card(folder, repo, checked_licence(licence), to, words)
    from huggingface_hub import ModelCard

    card = ModelCard(own, ignore_metadata_errors=True)
    if licence is not None or licence_in(own) is None:
        card.data["license"] = checked_licence(licence)
    return str(card)


def licence_in(card: str) -> str | None:
    """The licence a card's front matter names."""
    from huggingface_hub import ModelCard

    named = ModelCard(card, ignore_metadata_errors=True).data.get("license")
    return str(named) if named else None


def has_licence(folder: Path) -> bool:
    """Whether the folder's own README.md names a licence already."""
    own = _own_card(folder)
    return own is not None and licence_in(own) is not None


def _own_card(folder: Path) -> str | None:
    """A README.md that says more than a made one would; one made by a program is made anew."""
    path = folder / "README.md"
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    made = _MADE_BY_MEMFIT in text or _MADE_BY_TRAINER in text
    return None if made and RunFolder(folder).summary.is_file() else text


def model_card(
    folder: Path, repo: str, licence: str, to: str = "hub", words: AuthorsWords | None = None
) -> str:
    """Front matter for the hub's search, its use and limits, then sections of figures."""
    run, words = RunFolder(folder), words or AuthorsWords()
    view = read_view(run) if run.summary.is_file() else None
    use, limits = words.intended_use.strip(), words.limitations.strip()
    use = use or t(
        "*To be filled in: which texts this model is for, and what its answers are used for.*"
    )
    limits = limits or t(
        "*To be filled in: what it must not be used for, and whose texts it has not seen.*"
    )
    known = "\n".join(f"- {one}" for one in (_known_limits(view) if view else ()))
    parts = [
        _front_matter(view, licence),
        f"# {repo.partition('/')[2]}\n\n{_opening(folder, view)}",
        _section(t("Use"), _usage(repo, to)),
        _section(t("Intended use"), use),
        _section(t("Limitations"), known, limits),
    ]
    versions = {} if view is None else view.summary.versions
    if view is not None:
        parts += [_results(view), _data(view), _training(view), _memory(view), _time(view)]
        parts.append(_plan(view))
    names = ("memfit", "torch", "transformers")
    found = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    parts.append(
        t("Trained and uploaded with memfit ({versions}).", versions=found)
        if found
        else t("Trained and uploaded with memfit.")
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(view: RunView | None, licence: str) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        license=licence,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["memfit", "text-classification"],
        base_model=_hub_id(view.summary.model) if view is not None else None,
        metrics=sorted(view.summary.metrics) if view is not None else None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _hub_id(name: str) -> str | None:
    """The base model if it is on the hub; the path of a folder is private."""
    if Path(name).is_absolute() or Path(name).exists() or ":" in name or "\\" in name:
        return None
    return name if name.count("/") <= 1 and not name.startswith((".", "~")) else None


def _opening(folder: Path, view: RunView | None) -> str:
    if view is not None:
        task, labels = view.summary.task, list(view.summary.labels)
    else:
        named = read_json(folder / "config.json").get("id2label")
        task, labels = "", list((named or {"0": "LABEL_0", "1": "LABEL_1"}).values())
    kinds = {
        "regression": N_("Gives a text a number ({names})."),
        "multi_label": N_("Gives a text any of these labels: {names}."),
    }
    kind = kinds.get(task, N_("Gives a text one of these labels: {names}."))
    return t(kind, names=", ".join(_cell(label) for label in labels))


def _usage(repo: str, to: str) -> str:
    lines = ["from transformers import pipeline", ""]
    source = f'"{repo}"'
    if to == "modelscope":
        lines = ["from modelscope_hub import HubApi", *lines]
        source = f'str(HubApi().download_repo("{repo}", "model"))'
    lines.append(f'classify = pipeline("text-classification", model={source})')
    lines.append('print(classify("..."))')
    return "```python\n" + "\n".join(lines) + "\n```"


def _known_limits(view: RunView) -> Iterable[str]:
    """What the figures tell of its limits."""
    summary = view.summary
    if summary.task == "single_label":
        yield t("A text that none of the labels fits gets one of them all the same.")
    if rows := summary.data.get("validation_rows"):
        yield t(
            "It was measured on {rows} rows only, of the kind it was trained on: texts of another "
            "kind may be answered worse.",
            rows=number(rows),
        )
    if (tokens := summary.lengths.get("max_length")) is not None:
        yield t("What follows the first {tokens} tokens of a text is not read.", tokens=tokens)
    classes = view.evaluation.classes if view.evaluation is not None else ()
    weak = sorted((row for row in classes if row.recall < _WEAK_RECALL), key=lambda row: row.recall)
    for row in weak[:_MOST_WEAK]:
        name = _cell(row.name)
        yield t("Of the texts of class {name} it finds {share:.0%}.", name=name, share=row.recall)


def _results(view: RunView) -> str:
    """Metrics, classes, and what makes them less than they seem; no text of the data is in it."""
    summary = view.summary
    rows = summary.data.get("validation_rows")
    counted = isinstance(rows, int)
    kind = N_("On {rows} validation rows.") if counted else N_("On the validation rows.")
    why = summary.why if summary.why == "imbalance" else ""  # its reader has no --positive-label
    said = [
        t(kind, rows=number(rows)),
        averaging_sentence(summary.averaging, _cell(summary.positive), why),
    ]
    if summary.threshold is not None:
        kind = N_(
            "memfit answers by a threshold of {threshold:.3g}, kept in config.json; transformers "
            "alone answers by the highest probability."
        )
        said.append(t(kind, threshold=summary.threshold))
    metrics = _table(
        [t("metric"), t("value")],
        [(named("metric", name), metric(value)) for name, value in summary.metrics.items()],
    )
    classes = ""
    if view.evaluation is not None and view.evaluation.classes:
        every = len(view.evaluation.classes)
        each = sections.class_table(view.evaluation, digits=4, most=every)
        classes = _table(each.head, each.rows)
    warned = "\n".join(f"- {_cell(one.sentence)}" for one in summary.warnings)
    results = _section(t("Results"), together([one for one in said if one]), metrics, classes)
    return results + (f"\n\n{_section(t('Warnings'), warned)}" if warned else "")


def _data(view: RunView) -> str:
    data, lengths = view.summary.data, view.summary.lengths
    dropped = sum(int(data.get(name, 0)) for name in ("dropped_no_text", "dropped_no_label"))
    counts = {**lengths, **data, "dropped": dropped}
    rows = [
        (t(title), number(counts[name]))
        for name, title in _COUNTS.items()
        if isinstance(counts.get(name), int)
    ]
    if {"p50", "p90", "max"} <= lengths.keys():
        spread = " / ".join(str(lengths[name]) for name in ("p50", "p90", "max"))
        rows.append((t("tokens of a text: median / 90 % / longest"), spread))
    if "max_length" in lengths:
        cut = t("{tokens} tokens", tokens=lengths["max_length"])
        rows.append((t("texts are cut at"), cut))
    classes = sections.rows_of_classes(view)
    spread = _table(classes.head, classes.rows) if classes is not None else ""
    return _section(t("Data"), _table(["", t("count")], rows), spread)


def _training(view: RunView) -> str:
    name, facts = view.summary.model, view.summary.training
    known = _hub_id(name)
    base = f"`{known}`" if known is not None else t("a model from a local folder")
    if name.startswith("modelscope:"):
        base = t("`{name}` (ModelScope)", name=name.removeprefix("modelscope:"))
    rows = [(t("base model"), base)]
    rows += [
        (named("training", key), sections.fact(key, facts[key]))
        for key in _TRAINING
        if facts.get(key) is not None
    ]
    return _section(t("Training"), _table(["", t("value")], rows))


def _memory(view: RunView) -> str:
    if not view.peaks:
        return ""
    table = memory_bar.peak_table(view.peaks)
    rows = [(row["name"], *row["cells"]) for row in table["rows"]]
    last, *sizes = rows.pop()
    shown = _table([t("at the peak"), *table["columns"]], [*rows, (f"**{last}**", *sizes)])
    budget = view.summary.memory.budget_bytes
    within = "" if budget is None else t("The budget was {budget}.", budget=format_both(budget))
    return _section(t("Memory") if view.on_cpu else pt("of a GPU", "Memory"), within, shown)


def _time(view: RunView) -> str:
    summary = view.summary
    rows = [(named("work", name), format_seconds(one)) for name, one in summary.seconds.items()]
    if not rows:
        return ""
    on = t("On {device}.", device=_cell(summary.device)) if summary.device else ""
    return _section(t("Time"), on, _table([t("part"), t("time")], rows))


def _plan(view: RunView) -> str:
    """How it was made to fit."""
    made = sections.plan(view)
    if view.plan is None or made is None or made["strategies"] is None:
        return ""
    fidelity = named("fidelity", view.plan.fidelity)
    does = t("What it does to the result: {fidelity}.", fidelity=_cell(fidelity))
    table = _table(made["strategies"].head, made["strategies"].rows)
    return _section(t("Plan"), does if view.plan.fidelity else "", table)


def _section(heading: str, *parts: str) -> str:
    return "\n\n".join([f"## {heading}", *(part for part in parts if part)])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *lines])


def _cell(value: object) -> str:
    """Names come from the data: on one line, and no cell or tag may be made of them."""
    text = clean(value).strip()
    for char, written in (("|", "\\|"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(char, written)
    return text
