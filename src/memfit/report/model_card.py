"""The model card: what the model does, what it learned from, how good it is, what it cost.

It speaks the language of who uploads; metadata, and the line that tells it was made, stay.

It is made of counts and figures. Texts of the data, local paths and file names are not in it.
`model_card.md` is its template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.config.files import read_json
from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, t
from memfit.printing import clean
from memfit.records.results import RunFolder
from memfit.report import memory_bar, sections
from memfit.report.formatting import averaging_sentence, metric, named, number, together
from memfit.report.page import fill
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
    from huggingface_hub import ModelCardData

    run, words = RunFolder(folder), words or AuthorsWords()
    view = read_view(run) if run.summary.is_file() else None
    front = ModelCardData(
        license=licence,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["memfit", "text-classification"],
        base_model=_hub_id(view.summary.model) if view is not None else None,
        metrics=sorted(view.summary.metrics) if view is not None else None,
    )
    labels = view.summary.labels if view is not None else _labels(folder)
    versions = {} if view is None else view.summary.versions
    made_with = ("memfit", "torch", "transformers")
    card = fill(
        "model_card.md",
        front=front.to_yaml(),
        repo=repo,
        to=to,
        task="" if view is None else view.summary.task,
        labels=labels,
        use=words.intended_use.strip(),
        limitations=words.limitations.strip(),
        versions=", ".join(f"{name} {versions[name]}" for name in made_with if name in versions),
        cell=_cell,
        run=_figures(view) if view is not None else None,
    )
    return re.sub(r"\n{3,}", "\n\n", card).strip() + "\n"


def _labels(folder: Path) -> tuple[str, ...]:
    named = read_json(folder / "config.json").get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    return tuple(str(label) for label in named.values())


def _figures(view: RunView) -> dict[str, Any]:
    """What the run measured, as the template takes it."""
    summary, data, lengths = view.summary, view.summary.data, view.summary.lengths
    classes = view.evaluation.classes if view.evaluation is not None else ()
    weak = sorted((row for row in classes if row.recall < _WEAK_RECALL), key=lambda row: row.recall)
    why = summary.why if summary.why == "imbalance" else ""  # its reader has no --positive-label
    rows = data.get("validation_rows")
    counted = isinstance(rows, int)
    kind = N_("On {rows} validation rows.") if counted else N_("On the validation rows.")
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
    dropped = sum(int(data.get(name, 0)) for name in ("dropped_no_text", "dropped_no_label"))
    known_counts = {**lengths, **data, "dropped": dropped}
    counts = [
        (t(title), number(known_counts[key]))
        for key, title in _COUNTS.items()
        if isinstance(known_counts.get(key), int)
    ]
    if {"p50", "p90", "max"} <= lengths.keys():
        spread = " / ".join(str(lengths[key]) for key in ("p50", "p90", "max"))
        counts.append((t("tokens of a text: median / 90 % / longest"), spread))
    if "max_length" in lengths:
        tokens = t("{tokens} tokens", tokens=lengths["max_length"])
        counts.append((t("texts are cut at"), tokens))
    known, name, plan = _hub_id(summary.model), summary.model, sections.plan(view)
    base = f"`{known}`" if known is not None else t("a model from a local folder")
    if name.startswith("modelscope:"):
        base = t("`{name}` (ModelScope)", name=name.removeprefix("modelscope:"))
    facts = {key: summary.training[key] for key in _TRAINING if key in summary.training}
    budget = summary.memory.budget_bytes
    return {
        "rows": number(rows) if counted else "",
        "max_length": lengths.get("max_length"),
        "weak": weak[:_MOST_WEAK],
        "sentences": together([one for one in said if one]),
        "metrics": [(named("metric", key), metric(one)) for key, one in summary.metrics.items()],
        "classes": sections.class_table(classes, 4, len(classes)) if classes else None,
        "warnings": [one.sentence for one in summary.warnings],
        "counts": counts,
        "class_rows": sections.rows_of_classes(view),
        "training": [
            (t("base model"), base),
            *(
                (named("training", key), sections.fact(key, one))
                for key, one in facts.items()
                if one is not None
            ),
        ],
        "budget": "" if budget is None else format_both(budget),
        "peaks": memory_bar.peak_table(view.peaks) if view.peaks else None,
        "on_cpu": view.on_cpu,
        "device": summary.device,
        "times": [(named("work", key), format_seconds(s)) for key, s in summary.seconds.items()],
        "fidelity": named("fidelity", view.plan.fidelity) if view.plan else "",
        "strategies": plan["strategies"] if plan else None,
        "export": _export(view),
    }


def _export(view: RunView) -> dict[str, Any] | None:
    """The files that are uploaded beside the weights; which rows scored them may name a path."""
    shown = sections.export(view)
    if shown is None or view.export is None or not any(one.file for one in view.export.variants):
        return None
    return {**shown, "table": sections.export_table(view.export, written_only=True)}


def _hub_id(name: str) -> str | None:
    """The base model if it is on the hub; the path of a folder is private."""
    if Path(name).is_absolute() or Path(name).exists() or ":" in name or "\\" in name:
        return None
    return name if name.count("/") <= 1 and not name.startswith((".", "~")) else None


def _cell(value: object) -> str:
    """Names come from the data: on one line, and no cell or tag may be made of them."""
    text = clean(value).strip()
    for char, written in (("|", "\\|"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(char, written)
    return text
