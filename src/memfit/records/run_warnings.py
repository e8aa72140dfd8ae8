"""What makes the figures of a run less than they seem, each with what to do about it.

One list for the terminal, summary.json, the report and the model card. A warning is its kind and
its numbers: the sentence is made where it is read, in the reader's language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memfit.i18n import N_, speaking, t
from memfit.printing import clean
from memfit.records.scoring import STRONG_IMBALANCE, imbalance

if TYPE_CHECKING:
    from memfit.data import DataCounts, LengthSummary
    from memfit.records.evaluation import Evaluation
    from memfit.records.scoring import Scoring

FEW_ROWS = 20
"""With fewer validation rows of a class, one row moves its recall by more than five points."""

MANY_CUT = 1 / 3

MANY_UNKNOWN = 0.05
"""Vocabularies of the texts' language lack far fewer words."""

_MOST_NAMES = 3

_KINDS = {
    "one_class": (
        N_(
            "The model answers {label} for every one of the {rows:,} rows: {missed} is never found."
        ),
        N_(
            "Do not use this model. Train longer or at another learning rate, give rare classes "
            "more weight with --class-weights balanced, or add rows of them."
        ),
    ),
    "never_found": (
        N_("Never found in the {rows:,} rows: {missed}."),
        N_(
            "Give rare classes more weight with --class-weights balanced, train longer, or add "
            "rows of them."
        ),
    ),
    "no_labels": (
        N_("The model gives no label to any of the {rows:,} rows."),
        N_(
            "Do not use this model. Train longer or at a higher learning rate, or try "
            "--class-weights balanced and --threshold auto."
        ),
    ),
    "imbalance": (
        N_("{most} has {ratio:,} training rows for each one of {fewest} ({rows:,} rows)."),
        N_(
            "Look at F1, not at accuracy. --class-weights balanced gives rare classes more "
            "weight; more rows of them help most."
        ),
    ),
    "few_rows": (
        N_("Fewer than {least} validation rows: {names}. Their figures rest on a few texts."),
        N_("Add rows of these classes, or validate on more of them with --validation-split."),
    ),
    "contradictions": (
        N_("{rows:,} rows have a text that other rows label differently."),
        N_("Correct or remove them: no model can learn both. One of them begins: {example}"),
    ),
    "duplicates": (
        N_(
            "{rows:,} validation rows repeat a text that is also trained on, which flatters the "
            "figures."
        ),
        N_(
            "Remove them from one of the two sides; where a class has hardly any different texts, "
            "add others."
        ),
    ),
    "cut": (
        N_("{share:.0%} of the texts are longer than {length:,} tokens and lose their end."),
        N_("Try --max-length {better:,}, which nine in ten texts fit into."),
    ),
    "unknown": (
        N_("The model's vocabulary lacks {share:.0%} of the words, and cannot tell them apart."),
        N_(
            "Choose a model for the language and the characters of the texts. One of them begins: "
            "{example}"
        ),
    ),
    "tuned": (
        N_("The threshold of {threshold:.3g} was tuned on the rows these figures are from."),
        N_("Expect a little less on new texts; memfit evaluate on another table tells."),
    ),
}
"""What is the matter, and what to do."""

_ADVICE = {
    ("cut", "whole"): N_(
        "The model reads no more. Shorten the texts, or choose a model that reads longer ones."
    ),
    ("cut", "part"): N_("Try --max-length {better:,}, the most the model reads."),
    ("one_class", "weighted"): N_(
        "Do not use this model. Train longer or at another learning rate, or add rows of rare "
        "classes."
    ),
    ("one_class", "frequent"): N_(
        "Do not use this model. Train longer or at another learning rate."
    ),
    ("never_found", "weighted"): N_("Train longer, or add rows of these classes."),
    ("never_found", "frequent"): N_("Train longer, or at another learning rate."),
    ("no_labels", "weighted"): N_(
        "Do not use this model. Train longer or at a higher learning rate, or try --threshold auto."
    ),
    ("imbalance", "weighted"): N_(
        "Look at F1, not at accuracy. More rows of rare classes help most."
    ),
    ("imbalance", "large"): N_(
        "Look at the figures of {fewest}, not at accuracy or at the F1 of {most}. --class-weights "
        "balanced gives rare classes more weight; more rows of them help most."
    ),
    ("imbalance", "large weighted"): N_(
        "Look at the figures of {fewest}, not at accuracy or at the F1 of {most}. More rows of "
        "{fewest} help most."
    ),
}
"""Other advice by the case: the classes are `weighted` already, the class that is missed is a
`frequent` one, or F1 is that of the `large` class."""


@dataclass(frozen=True, slots=True)
class RunWarning:
    """One thing that is the matter."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """What is the matter."""
        return t(_KINDS[self.kind][0], **self._said())

    @property
    def advice(self) -> str:
        """What to do."""
        case = str(self.values.get("case", ""))
        return t(_ADVICE.get((self.kind, case), _KINDS[self.kind][1]), **self._said())

    def to_dict(self) -> dict[str, Any]:
        """For JSON; programs get the English sentences too."""
        with speaking("en"):
            said = {"message": self.sentence, "advice": self.advice}
        return {"kind": self.kind, **said, "values": dict(self.values)}

    def _said(self) -> dict[str, Any]:
        """Texts of the data made safe, lists as their first few."""
        return {name: _shown(value) for name, value in self.values.items()}


def warnings_from(stored: Any) -> tuple[RunWarning, ...]:
    """The warnings of a summary.json; kinds of other versions are skipped."""
    return tuple(
        RunWarning(one["kind"], one.get("values") or {})
        for one in stored or ()
        if isinstance(one, Mapping) and one.get("kind") in _KINDS
    )


def data_warnings(
    counts: DataCounts,
    lengths: LengthSummary | None = None,
    task: str = "single_label",
    *,
    scoring: Scoring | None = None,
    weighted: bool = False,
) -> tuple[RunWarning, ...]:
    """What the table alone tells, before anything is trained; `weighted` if its classes are."""
    found = []
    train, validation = counts.train_class_counts, counts.validation_class_counts
    if task == "single_label" and (ratio := imbalance(train)) > STRONG_IMBALANCE:
        known = {name: rows for name, rows in train.items() if rows}
        fewest = min(known, key=lambda name: known[name])
        most = max(known, key=lambda name: known[name])
        said = {"most": most, "fewest": fewest, "rows": known[fewest], "ratio": round(ratio)}
        large = scoring is not None and (scoring.averaging, scoring.positive) == ("binary", most)
        found.append(RunWarning("imbalance", {**said, **_case(large=large, weighted=weighted)}))
    few = [f"{name} ({rows})" for name, rows in validation.items() if rows < FEW_ROWS]
    if few:
        found.append(RunWarning("few_rows", {"least": FEW_ROWS, "names": few}))
    if counts.contradicting_rows:
        said = {"rows": counts.contradicting_rows, "example": counts.contradicting_example}
        found.append(RunWarning("contradictions", said))
    if counts.duplicates_across_split:
        found.append(RunWarning("duplicates", {"rows": counts.duplicates_across_split}))
    if lengths is not None and lengths.cut_fraction > MANY_CUT:
        better = max(lengths.p90, lengths.max_length + 1)
        limit = lengths.most_tokens or better
        case = _case(whole=lengths.max_length >= limit, part=lengths.max_length < limit < better)
        said = {"share": lengths.cut_fraction, "length": lengths.max_length, **case}
        found.append(RunWarning("cut", {**said, "better": min(better, limit)}))
    if lengths is not None and lengths.unknown_share > MANY_UNKNOWN:
        said = {"share": lengths.unknown_share, "example": lengths.unknown_example}
        found.append(RunWarning("unknown", said))
    return tuple(found)


def answer_warnings(evaluation: Evaluation, *, weighted: bool = False) -> tuple[RunWarning, ...]:
    """What the answers tell, once there are some; `weighted` if the training's classes were."""
    found = []
    lost = [row for row in evaluation.classes if row.rows and not row.recall]
    missed = [row.name for row in lost]
    # More weight is for a class with less than an even share of the rows.
    frequent = any(row.rows * len(evaluation.classes) >= evaluation.rows for row in lost)
    case = _case(frequent=True) if frequent else _case(weighted=weighted)
    if evaluation.task == "multi_label" and not any(row.recall for row in evaluation.classes):
        said = {"rows": evaluation.rows, **_case(weighted=weighted)}
        found.append(RunWarning("no_labels", said))
    elif label := _only_answer(evaluation):
        said = {"label": label, "rows": evaluation.rows, "missed": missed, **case}
        found.append(RunWarning("one_class", said))
    elif missed:
        said = {"rows": evaluation.rows, "missed": missed, **case}
        found.append(RunWarning("never_found", said))
    if evaluation.tuned and evaluation.threshold is not None:
        found.append(RunWarning("tuned", {"threshold": evaluation.threshold}))
    return tuple(found)


def _case(**cases: bool) -> dict[str, str]:
    """The cases that hold, as a warning keeps them; nothing where none does."""
    holding = " ".join(name for name, holds in cases.items() if holds)
    return {"case": holding} if holding else {}


def _only_answer(evaluation: Evaluation) -> str:
    """The class that every row is given, where other classes have rows too."""
    said = [sum(column) for column in zip(*evaluation.confusion, strict=True)]
    there = [row for row in evaluation.classes if row.rows]
    if len(there) < 2 or sum(count > 0 for count in said) != 1:
        return ""
    return next(row.name for row, count in zip(evaluation.classes, said, strict=True) if count)


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Sequence):
        listed = t(", ").join(clean(one) for one in value[:_MOST_NAMES])
        more = len(value) - _MOST_NAMES
        return t("{names} and {count:,} more", names=listed, count=more) if more > 0 else listed
    return value
