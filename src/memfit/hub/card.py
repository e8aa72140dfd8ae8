"""The model card: what the model does, what it learned from, how good it is, what it cost.

It speaks the language of who uploads; metadata, and the line that tells it was made, stay.

It is made of counts and figures. Texts of the data, local paths and file names are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit import toml
from memfit.evaluation import ClassRow
from memfit.files import read_json
from memfit.hub.licences import checked_licence
from memfit.memory.components import MemoryPeak
from memfit.messages import has, language, t
from memfit.results import MemorySummary, RunFolder, RunSummary, read_evaluation, read_summary
from memfit.safe_text import clean
from memfit.units import format_both, format_bytes, format_seconds

_MADE_BY_TRAINER = "generated automatically according to the information the Trainer had access to"
_MADE_BY_MEMFIT = "Trained and uploaded with memfit"
_FACTS = (
    "parameters", "learning_parameters", "epochs", "steps", "effective_batch", "learning_rate",
    "optim", "seed",
)  # fmt: skip


def card_for(folder: Path, repo: str, licence: str | None, to: str) -> str:
    """The README.md somebody wrote into the folder, or one made from the run's figures."""
    own = _own_card(folder)
    if own is None:
        return model_card(folder, repo, checked_licence(licence), to)
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


def model_card(folder: Path, repo: str, licence: str, to: str = "hub") -> str:
    """Front matter for the hub's search, then sections of figures."""
    run = RunFolder(folder)
    summary = read_summary(folder) if run.summary.is_file() else None
    parts = [
        _front_matter(summary, licence),
        f"# {repo.partition('/')[2]}\n\n{_opening(folder, summary)}",
        _usage(repo, to),
    ]
    if summary is not None:
        evaluated = read_evaluation(folder)
        classes = evaluated[0].classes if evaluated is not None else ()
        parts += [
            _results(summary, classes),
            _data(summary),
            _training(summary),
            _memory(summary.memory),
            _time(summary),
        ]
    parts += [_plan(folder), _made_with(summary)]
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
    """The base model where it is one of the hub; a folder's path is nobody's affair."""
    if Path(name).is_absolute() or Path(name).exists() or ":" in name or "\\" in name:
        return None
    return name if name.count("/") <= 1 and not name.startswith((".", "~")) else None


def _base_model(name: str) -> str:
    if name.startswith("modelscope:"):
        return t("card.base.modelscope", name=name.removeprefix("modelscope:"))
    known = _hub_id(name)
    return f"`{known}`" if known is not None else t("card.base.folder")


def _opening(folder: Path, summary: RunSummary | None) -> str:
    labels = list(summary.labels) if summary is not None else _labels(folder)
    names = ", ".join(_cell(label) for label in labels)
    if summary is not None and summary.task == "regression":
        return t("card.opening.number", names=names)
    several = summary is not None and summary.task == "multi_label"
    return t("card.opening.several" if several else "card.opening.one", names=names)


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
    return f"## {t('card.use')}\n\n```python\n" + "\n".join(lines) + "\n```"


def _results(summary: RunSummary, classes: Sequence[ClassRow]) -> str:
    rows = summary.data.get("validation_rows")
    kind = "card.on.rows" if isinstance(rows, int) else "card.on.some"
    if summary.positive:
        kind += ".positive"
    elif summary.averaging:
        kind += ".averaged"
    said = {"name": _cell(summary.positive), "how": summary.averaging, "rows": _count(rows)}
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
    opening = f"## {t('card.results')}\n\n{t(kind, **said)}"
    return "\n\n".join(part for part in (opening, metrics, per_class) if part)


def _data(summary: RunSummary) -> str:
    data, lengths = summary.data, summary.lengths
    dropped = int(data.get("dropped_no_text", 0)) + int(data.get("dropped_no_label", 0))
    cut = t("card.rows.cut.tokens", tokens=lengths.get("max_length"))
    rows = [
        (t("card.rows.train"), _count(data.get("train_rows"))),
        (t("card.rows.validation"), _count(data.get("validation_rows"))),
        (t("card.rows.dropped"), f"{dropped:,}"),
        (t("card.rows.duplicates"), _count(data.get("duplicates_across_split"))),
        (t("card.rows.lengths"), _lengths(lengths)),
        (t("card.rows.cut"), cut if "max_length" in lengths else ""),
        (t("card.rows.lost"), _count(lengths.get("cut_rows"))),
    ]
    train, check = data.get("train_class_counts") or {}, data.get("validation_class_counts") or {}
    classes = _table(
        _heads("class", "train", "validation"),
        [(name, f"{count:,}", f"{check.get(name, 0):,}") for name, count in train.items()],
    )
    table = _table(("", *_heads("count")), [row for row in rows if row[1]])
    return "\n\n".join(part for part in (f"## {t('card.data')}", table, classes) if part)


def _lengths(lengths: Mapping[str, Any]) -> str:
    if not {"p50", "p90", "max"} <= lengths.keys():
        return ""
    return f"{lengths['p50']} / {lengths['p90']} / {lengths['max']}"


def _training(summary: RunSummary) -> str:
    training = summary.training
    rows = [(t("card.fact.base"), _base_model(summary.model))]
    rows += [
        (t(f"card.fact.{key}"), _number(training[key]))
        for key in _FACTS
        if training.get(key) is not None
    ]
    return f"## {t('card.training')}\n\n" + _table(("", *_heads("value")), rows)


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
    rows.append((t("card.memory.device"), *sizes))
    table = _table(_heads("peak", *known), rows)
    budget = memory.budget_bytes
    within = "" if budget is None else t("card.memory.budget", budget=format_both(budget)) + "\n\n"
    return f"## {t('card.memory')}\n\n{within}{table}"


def _component(peak: MemoryPeak, name: str) -> int:
    return sum(size for one, size in peak.components.items() if str(one) == name)


def _time(summary: RunSummary) -> str:
    rows = [
        (t(f"card.time.{name}") if has(f"card.time.{name}") else name, format_seconds(value))
        for name, value in summary.seconds.items()
    ]
    on = t("card.time.on", device=_cell(summary.device)) + "\n\n" if summary.device else ""
    return f"## {t('card.time')}\n\n{on}" + _table(_heads("part", "time"), rows) if rows else ""


def _plan(folder: Path) -> str:
    """How it was made to fit, where a plan lies beside the model."""
    path = folder / "plan.toml"
    if not path.is_file():
        return ""
    tables = toml.read(path)
    strategies = tables.get("strategies")
    if not isinstance(strategies, Mapping):
        return ""
    reasons = tables.get("reasons")
    reasons = reasons if isinstance(reasons, Mapping) else {}
    rows = [
        (f"`{name}`", _settings(settings), str(reasons.get(name, "")))
        for name, settings in strategies.items()
    ]
    fidelity = tables.get("fidelity")
    does = t("card.plan.fidelity", fidelity=_cell(fidelity)) + "\n\n" if fidelity else ""
    return f"## {t('card.plan')}\n\n{does}" + _table(_heads("strategy", "settings", "why"), rows)


def _settings(settings: Any) -> str:
    values = settings.items() if isinstance(settings, Mapping) else ()
    return ", ".join(f"{name} = {value}" for name, value in values)


def _made_with(summary: RunSummary | None) -> str:
    versions = summary.versions if summary is not None else {}
    names = ("memfit", "torch", "transformers")
    kept = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return t("card.made.versions", versions=kept) if kept else t("card.made")


def _heads(*names: str) -> tuple[str, ...]:
    return tuple(t(f"card.head.{name}") for name in names)


def _worded(group: str, name: str) -> str:
    """A component or a metric in Chinese; in English under the name programs know it by."""
    message = f"report.{group}.{name}"
    return t(message) if language() != "en" and has(message) else name


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
