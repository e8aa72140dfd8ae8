"""The model card: what the model does, what it learned from, how good it is, what it cost.

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
from memfit.results import MemorySummary, RunFolder, RunSummary, read_evaluation, read_summary
from memfit.safe_text import clean
from memfit.units import format_both, format_bytes, format_seconds

_MADE_BY_TRAINER = "generated automatically according to the information the Trainer had access to"
_MADE_BY_MEMFIT = "Trained and uploaded with memfit"


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
        return f"`{name.removeprefix('modelscope:')}` (ModelScope)"
    known = _hub_id(name)
    return f"`{known}`" if known is not None else "a model from a local folder"


def _opening(folder: Path, summary: RunSummary | None) -> str:
    labels = list(summary.labels) if summary is not None else _labels(folder)
    names = ", ".join(_cell(label) for label in labels)
    if summary is not None and summary.task == "regression":
        return f"Gives a text a number ({names})."
    several = summary is not None and summary.task == "multi_label"
    given = "any of these labels" if several else "one of these labels"
    return f"Gives a text {given}: {names}."


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
    return "## Use\n\n```python\n" + "\n".join(lines) + "\n```"


def _results(summary: RunSummary, classes: Sequence[ClassRow]) -> str:
    rows = summary.data.get("validation_rows")
    how = f"On {rows:,} validation rows" if isinstance(rows, int) else "On the validation rows"
    if summary.positive:
        how += f"; precision, recall and F1 are those of {_cell(summary.positive)}"
    elif summary.averaging:
        how += f"; averaged over the classes ({summary.averaging})"
    metrics = _table(
        ("metric", "value"), [(name, _share(value)) for name, value in summary.metrics.items()]
    )
    per_class = _table(
        ("class", "precision", "recall", "F1", "rows"),
        [
            (row.name, *map(_share, (row.precision, row.recall, row.f1)), f"{row.rows:,}")
            for row in classes
        ],
    )
    return "\n\n".join(part for part in (f"## Results\n\n{how}.", metrics, per_class) if part)


def _data(summary: RunSummary) -> str:
    data, lengths = summary.data, summary.lengths
    dropped = int(data.get("dropped_no_text", 0)) + int(data.get("dropped_no_label", 0))
    rows = [
        ("rows to train on", _count(data.get("train_rows"))),
        ("rows to validate on", _count(data.get("validation_rows"))),
        ("rows left out, without text or label", f"{dropped:,}"),
        ("validation texts also in training", _count(data.get("duplicates_across_split"))),
        ("tokens of a text: median / 90 % / longest", _lengths(lengths)),
        ("texts are cut at", f"{lengths['max_length']} tokens" if "max_length" in lengths else ""),
        ("texts that lost their end", _count(lengths.get("cut_rows"))),
    ]  # fmt: skip
    train, check = data.get("train_class_counts") or {}, data.get("validation_class_counts") or {}
    classes = _table(
        ("class", "training rows", "validation rows"),
        [(name, f"{count:,}", f"{check.get(name, 0):,}") for name, count in train.items()],
    )
    table = _table(("", "count"), [row for row in rows if row[1]])
    return "\n\n".join(part for part in ("## Data", table, classes) if part)


def _lengths(lengths: Mapping[str, Any]) -> str:
    if not {"p50", "p90", "max"} <= lengths.keys():
        return ""
    return f"{lengths['p50']} / {lengths['p90']} / {lengths['max']}"


def _training(summary: RunSummary) -> str:
    training = summary.training
    rows = [("base model", _base_model(summary.model))]
    rows += [
        (title, _number(training[key]))
        for key, title in (
            ("parameters", "parameters"),
            ("learning_parameters", "of them learned"),
            ("epochs", "epochs"),
            ("steps", "optimizer steps"),
            ("effective_batch", "rows a step"),
            ("learning_rate", "learning rate"),
            ("optim", "optimizer"),
            ("seed", "seed"),
        )
        if training.get(key) is not None
    ]
    return "## Training\n\n" + _table(("", "value"), rows)


def _memory(memory: MemorySummary) -> str:
    peaks = {"predicted": memory.predicted, "measured": memory.measured}
    known: dict[str, MemoryPeak] = {name: peak for name, peak in peaks.items() if peak is not None}
    if not known:
        return ""
    components = dict.fromkeys(str(one) for peak in known.values() for one in peak.components)
    rows = [
        (name, *(format_bytes(_component(peak, name)) for peak in known.values()))
        for name in components
    ]
    rows.append(("**on the device**", *(format_bytes(one.device_bytes) for one in known.values())))
    table = _table(("at the peak", *known), rows)
    budget = memory.budget_bytes
    within = f"The budget was {format_both(budget)}.\n\n" if budget is not None else ""
    return f"## Memory\n\n{within}{table}"


def _component(peak: MemoryPeak, name: str) -> int:
    return sum(size for one, size in peak.components.items() if str(one) == name)


def _time(summary: RunSummary) -> str:
    rows = [(name, format_seconds(value, "en")) for name, value in summary.seconds.items()]
    on = f"On {_cell(summary.device)}.\n\n" if summary.device else ""
    return f"## Time\n\n{on}" + _table(("part", "time"), rows) if rows else ""


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
    does = f"What it does to the result: {_cell(fidelity)}.\n\n" if fidelity else ""
    return f"## Plan\n\n{does}" + _table(("strategy", "settings", "why"), rows)


def _settings(settings: Any) -> str:
    values = settings.items() if isinstance(settings, Mapping) else ()
    return ", ".join(f"{name} = {value}" for name, value in values)


def _made_with(summary: RunSummary | None) -> str:
    versions = summary.versions if summary is not None else {}
    names = ("memfit", "torch", "transformers")
    kept = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    return f"{_MADE_BY_MEMFIT} ({kept})." if kept else f"{_MADE_BY_MEMFIT}."


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
