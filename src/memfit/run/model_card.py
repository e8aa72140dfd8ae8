"""The model card: what the model does, what it learned from, how good it is, what it cost.

It speaks the language of who uploads; metadata, and the line that tells it was made, stay.

It is made of counts and figures. Texts of the data, local paths and file names are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.config import files
from memfit.config.files import read_json
from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, language, pt, shown, t
from memfit.memory.components import MemoryPeak
from memfit.printing import clean
from memfit.records.evaluation import ClassRow
from memfit.records.results import (
    MemorySummary,
    RunFolder,
    RunSummary,
    kept_reasons,
    read_evaluation,
    read_summary,
)
from memfit.report.formatting import averaging_sentence, together
from memfit.units import format_both, format_bytes, format_seconds

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
            t(
                "no licence given; name one with --licence, for instance --licence {first} (or "
                "{others})",
                first=COMMON[0],
                others=", ".join(COMMON[1:]),
            )
        )
    known = licence.strip().lower().replace(" ", "-")
    if known not in LICENCES:
        hint = nearest(known, LICENCES)
        raise ConfigError(
            t(
                "--licence is {name}, which the hubs do not know.{hint} Write other for one of "
                "your own",
                name=repr(licence),
                hint=hint,
            )
        )
    return known


_WEAK_RECALL = 0.5

_MOST_WEAK = 5
"""How many rarely found classes are named."""

_MADE_BY_TRAINER = "generated automatically according to the information the Trainer had access to"

_MADE_BY_MEMFIT = "Trained and uploaded with memfit"

_FACTS = {
    "parameters": N_("parameters"),
    "learning_parameters": N_("of them learned"),
    "epochs": N_("epochs"),
    "steps": N_("optimizer steps"),
    "effective_batch": N_("rows a step"),
    "learning_rate": N_("learning rate"),
    "optim": N_("optimizer"),
    "seed": N_("seed"),
    "best_by": N_("best model picked by"),
    "class_weights": N_("class weights"),
    "threshold": N_("threshold asked for"),
    "early_stopping": N_("evaluations without a better one before it stops"),
}

_HEADS = {
    "metric": N_("metric"),
    "value": N_("value"),
    "class": N_("class"),
    "precision": N_("precision"),
    "recall": N_("recall"),
    "rows": N_("rows"),
    "count": N_("count"),
    "train": N_("training rows"),
    "validation": N_("validation rows"),
    "peak": N_("at the peak"),
    "predicted": N_("predicted"),
    "measured": N_("measured"),
    "part": N_("part"),
    "time": N_("time"),
    "strategy": N_("strategy"),
    "settings": N_("settings"),
    "why": N_("why"),
}

_TIMES = {
    "on": N_("On {device}."),
    "data": N_("data"),
    "load": N_("load"),
    "plan": N_("plan"),
    "train": N_("train"),
    "evaluate": N_("evaluate"),
    "save": N_("save"),
    "total": N_("total"),
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
    run = RunFolder(folder)
    summary = read_summary(folder) if run.summary.is_file() else None
    evaluated = read_evaluation(folder) if summary is not None else None
    classes = evaluated[0].classes if evaluated is not None else ()
    said = words or AuthorsWords()
    parts = [
        _front_matter(summary, licence),
        f"# {repo.partition('/')[2]}\n\n{_opening(folder, summary)}",
        _usage(repo, to),
        _intended_use(said.intended_use),
        _limitations(said.limitations, summary, classes),
    ]
    if summary is not None:
        parts += [
            _results(summary, classes),
            _warnings(summary),
            _data(summary),
            _training(summary),
            _memory(summary.memory),
            _time(summary),
        ]
    parts += [_plan(folder, {} if summary is None else kept_reasons(summary)), _made_with(summary)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(summary: RunSummary | None, licence: str) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        license=licence,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["memfit", "text-classification"],
        base_model=_hub_id(summary.model) if summary is not None else None,
        metrics=sorted(summary.metrics) if summary is not None else None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _hub_id(name: str) -> str | None:
    """The base model if it is on the hub; the path of a folder is private."""
    if Path(name).is_absolute() or Path(name).exists() or ":" in name or "\\" in name:
        return None
    return name if name.count("/") <= 1 and not name.startswith((".", "~")) else None


def _base_model(name: str) -> str:
    if name.startswith("modelscope:"):
        return t("`{name}` (ModelScope)", name=name.removeprefix("modelscope:"))
    known = _hub_id(name)
    return f"`{known}`" if known is not None else t("a model from a local folder")


def _opening(folder: Path, summary: RunSummary | None) -> str:
    labels = list(summary.labels) if summary is not None else _labels(folder)
    names = ", ".join(_cell(label) for label in labels)
    if summary is not None and summary.task == "regression":
        return t("Gives a text a number ({names}).", names=names)
    several = summary is not None and summary.task == "multi_label"
    return t(
        N_("Gives a text any of these labels: {names}.")
        if several
        else N_("Gives a text one of these labels: {names}."),
        names=names,
    )


def _labels(folder: Path) -> list[str]:
    named = read_json(folder / "config.json").get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    return [str(label) for label in named.values()]


def _usage(repo: str, to: str) -> str:
    lines = ["from transformers import pipeline", ""]
    source = f'"{repo}"'
    if to == "modelscope":
        lines = ["from modelscope_hub import HubApi", *lines]
        source = f'str(HubApi().download_repo("{repo}", "model"))'
    lines.append(f'classify = pipeline("text-classification", model={source})')
    lines.append('print(classify("..."))')
    return _heading(t("Use")) + "```python\n" + "\n".join(lines) + "\n```"


def _intended_use(given: str) -> str:
    left = t("*To be filled in: which texts this model is for, and what its answers are used for.*")
    return _heading(t("Intended use")) + (given.strip() or left)


def _limitations(given: str, summary: RunSummary | None, classes: Sequence[ClassRow]) -> str:
    """What the figures tell, then what only the author knows."""
    left = t("*To be filled in: what it must not be used for, and whose texts it has not seen.*")
    lines = [f"- {one}" for one in _known_limits(summary, classes)]
    return _heading(t("Limitations")) + "\n".join([*lines, "", given.strip() or left]).strip()


def _known_limits(summary: RunSummary | None, classes: Sequence[ClassRow]) -> list[str]:
    if summary is None:
        return []
    said = []
    if summary.task == "single_label":
        said.append(t("A text that none of the labels fits gets one of them all the same."))
    if rows := _count(summary.data.get("validation_rows")):
        said.append(
            t(
                "It was measured on {rows} rows only, of the kind it was trained on: texts of "
                "another kind may be answered worse.",
                rows=rows,
            )
        )
    if (tokens := summary.lengths.get("max_length")) is not None:
        said.append(
            t("What follows the first {tokens} tokens of a text is not read.", tokens=tokens)
        )
    weak = sorted((row for row in classes if row.recall < _WEAK_RECALL), key=lambda row: row.recall)
    said += [
        t(
            "Of the texts of class {name} it finds {share:.0%}.",
            name=_cell(row.name),
            share=row.recall,
        )
        for row in weak[:_MOST_WEAK]
    ]
    return said


def _results(summary: RunSummary, classes: Sequence[ClassRow]) -> str:
    rows = summary.data.get("validation_rows")
    counted = isinstance(rows, int)
    kind = N_("On {rows} validation rows.") if counted else N_("On the validation rows.")
    why = summary.why if summary.why == "imbalance" else ""  # its reader has no --positive-label
    averaged = averaging_sentence(summary.averaging, _cell(summary.positive), why)
    said = [t(kind, rows=_count(rows)), averaged, _threshold(summary)]
    metrics = _table(
        _heads("metric", "value"),
        [(_worded("metric", name), _share(value)) for name, value in summary.metrics.items()],
    )
    first, *others = _heads("class", "precision", "recall", "rows")
    per_class = _table(
        (first, *others[:2], "F1", others[2]),
        [
            (row.name, *map(_share, (row.precision, row.recall, row.f1)), f"{row.rows:,}")
            for row in classes
        ],
    )
    opening = _heading(t("Results")) + together([one for one in said if one])
    return "\n\n".join(part for part in (opening, metrics, per_class) if part)


def _threshold(summary: RunSummary) -> str:
    if summary.threshold is None:
        return ""
    return t(
        "memfit answers by a threshold of {threshold:.3g}, kept in config.json; transformers alone "
        "answers by the highest probability.",
        threshold=summary.threshold,
    )


def _warnings(summary: RunSummary) -> str:
    """What makes the figures less than they seem; no text of the data is in these sentences."""
    lines = [f"- {_cell(one.sentence)}" for one in summary.warnings]
    return _heading(t("Warnings")) + "\n".join(lines) if lines else ""


def _data(summary: RunSummary) -> str:
    data, lengths = summary.data, summary.lengths
    dropped = int(data.get("dropped_no_text", 0)) + int(data.get("dropped_no_label", 0))
    cut = t("{tokens} tokens", tokens=lengths.get("max_length"))
    rows = [
        (t("rows to train on"), _count(data.get("train_rows"))),
        (t("rows to validate on"), _count(data.get("validation_rows"))),
        (t("rows left out, without text or label"), f"{dropped:,}"),
        (t("validation texts also in training"), _count(data.get("duplicates_across_split"))),
        (t("rows whose text has another label too"), _count(data.get("contradicting_rows"))),
        (t("tokens of a text: median / 90 % / longest"), _lengths(lengths)),
        (t("texts are cut at"), cut if "max_length" in lengths else ""),
        (t("texts that lost their end"), _count(lengths.get("cut_rows"))),
    ]
    train, check = data.get("train_class_counts") or {}, data.get("validation_class_counts") or {}
    classes = _table(
        _heads("class", "train", "validation"),
        [(name, f"{count:,}", f"{check.get(name, 0):,}") for name, count in train.items()],
    )
    table = _table(("", *_heads("count")), [row for row in rows if row[1]])
    return "\n\n".join(part for part in (_heading(t("Data")).rstrip(), table, classes) if part)


def _lengths(lengths: Mapping[str, Any]) -> str:
    if not {"p50", "p90", "max"} <= lengths.keys():
        return ""
    return f"{lengths['p50']} / {lengths['p90']} / {lengths['max']}"


def _training(summary: RunSummary) -> str:
    training = summary.training
    rows = [(t("base model"), _base_model(summary.model))]
    rows += [
        (t(fact), _number(training[key]))
        for key, fact in _FACTS.items()
        if training.get(key) is not None
    ]
    return _heading(t("Training")) + _table(("", *_heads("value")), rows)


def _memory(memory: MemorySummary) -> str:
    peaks = {"predicted": memory.predicted, "measured": memory.measured}
    known: dict[str, MemoryPeak] = {name: peak for name, peak in peaks.items() if peak is not None}
    if not known:
        return ""
    components = dict.fromkeys(str(one) for peak in known.values() for one in peak.components)
    rows = [
        (
            _worded("component", name),
            *(format_bytes(_component(peak, name)) for peak in known.values()),
        )
        for name in components
    ]
    sizes = (format_bytes(one.device_bytes) for one in known.values())
    rows.append((t("**on the device**"), *sizes))
    table = _table(_heads("peak", *known), rows)
    budget = memory.budget_bytes
    within = (
        "" if budget is None else t("The budget was {budget}.", budget=format_both(budget)) + "\n\n"
    )
    on_gpu = any(_component(one, "context") for one in known.values())
    return _heading(pt("of a GPU", "Memory") if on_gpu else t("Memory")) + within + table


def _component(peak: MemoryPeak, name: str) -> int:
    return sum(size for one, size in peak.components.items() if str(one) == name)


def _time(summary: RunSummary) -> str:
    rows = [
        (t(_TIMES[name]) if name in _TIMES else name, format_seconds(value))
        for name, value in summary.seconds.items()
    ]
    on = t("On {device}.", device=_cell(summary.device)) + "\n\n" if summary.device else ""
    if not rows:
        return ""
    return _heading(t("Time")) + on + _table(_heads("part", "time"), rows)


def _plan(folder: Path, kept: Mapping[str, str]) -> str:
    """How it was made to fit, where a plan lies beside the model."""
    path = folder / "plan.toml"
    if not path.is_file():
        return ""
    tables = files.read_toml(path)
    strategies = tables.get("strategies")
    if not isinstance(strategies, Mapping):
        return ""
    reasons = kept or tables.get("reasons")
    reasons = reasons if isinstance(reasons, Mapping) else {}
    rows = [
        (f"`{name}`", _settings(settings), shown(reasons.get(name, "")))
        for name, settings in strategies.items()
    ]
    fidelity = tables.get("fidelity")
    does = (
        t("What it does to the result: {fidelity}.", fidelity=_worded("fidelity", _cell(fidelity)))
        + "\n\n"
        if fidelity
        else ""
    )
    return _heading(t("Plan")) + does + _table(_heads("strategy", "settings", "why"), rows)


def _settings(settings: Any) -> str:
    values = settings.items() if isinstance(settings, Mapping) else ()
    return ", ".join(f"{name} = {value}" for name, value in values)


def _made_with(summary: RunSummary | None) -> str:
    versions = summary.versions if summary is not None else {}
    names = ("memfit", "torch", "transformers")
    kept = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return (
        t("Trained and uploaded with memfit ({versions}).", versions=kept)
        if kept
        else t("Trained and uploaded with memfit.")
    )


def _heading(text: str) -> str:
    return f"## {text}\n\n"


def _heads(*names: str) -> tuple[str, ...]:
    return tuple(t(_HEADS[name]) for name in names)


def _worded(group: str, name: str) -> str:
    """A component, metric or fidelity in Chinese; in English the name programs know it by."""
    from memfit.report.formatting import named

    return name if language() == "en" else named(group, name)


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


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
