"""Numbers, names and figures as the page's template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.config.schema import FIDELITY_NAMES
from memfit.config.training_fields import SHORT_NAMES
from memfit.i18n import N_, NP_, t
from memfit.memory.components import COMPONENT_NAMES
from memfit.printing import clean

_NAMES: Mapping[str, Mapping[str, str]] = {
    "component": {**COMPONENT_NAMES, "unused": N_("reserved, unused")},
    "metric": {
        "accuracy": N_("accuracy"),
        "precision": N_("precision"),
        "recall": N_("recall"),
        "f1": N_("F1"),
        "f1_macro": N_("F1 (macro)"),
        "mse": N_("MSE"),
        "mae": N_("MAE"),
        "r2": N_("R²"),
        "pearson": N_("Pearson"),
    },
    "task": {
        "single_label": NP_("report", "single-label"),
        "multi_label": NP_("report", "multi-label"),
        "regression": N_("regression"),
    },
    "fidelity": FIDELITY_NAMES,
    "strategy": {
        "activation_offload": N_("activation offload"),
        "checkpointing": N_("recomputing layers"),
        "cuda_graphs": N_("CUDA graphs"),
        "freezing": N_("freezing"),
        "frozen_features": N_("frozen features"),
        "fully_sharded": N_("sharded weights"),
        "fused_attention": N_("fused attention"),
        "fused_layers": N_("fused layers"),
        "gradient_release": N_("releasing gradients"),
        "half_precision": N_("half precision"),
        "lora": N_("LoRA"),
        "lowbit_adamw": N_("the low-bit optimizer"),
        "optimizer_offload": N_("optimizer offload"),
        "packing": N_("packing"),
        "sharded_state": N_("sharded optimizer state"),
        "small_state_optimizer": N_("a small-state optimizer"),
        "small_workspace": N_("small workspaces"),
        "state_offload": N_("state offload"),
        "truncation": N_("shorter texts"),
    },
    "training": {
        "steps": N_("steps"),
        "epochs": N_("epochs"),
        "effective_batch": N_("effective batch"),
        "learning_rate": N_("learning rate"),
        "optim": N_("optimizer"),
        "seed": N_("seed"),
        "parameters": N_("parameters"),
        "learning_parameters": N_("trainable parameters"),
        "best_by": N_("best model picked by"),
        "class_weights": N_("class weights"),
        "threshold": N_("threshold asked for"),
        "early_stopping": N_("evaluations without a better one before it stops"),
        "stopped_early": N_("stopped early"),
    },
    "setting": {
        "path": N_("data file"),
        "model": N_("model"),
        "task": N_("task"),
        "budget": N_("budget"),
        "strategies": N_("strategies"),
        "fidelity": N_("fidelity"),
        "device": N_("device"),
    },
    "work": {
        "data": N_("time reading the data"),
        "import": N_("time loading libraries"),
        "load": N_("time loading"),
        "plan": N_("time planning"),
        "train": N_("time training"),
        "evaluate": N_("time evaluating"),
        "save": N_("time saving"),
        "total": N_("time in all"),
    },
    "count": {
        "rows_read": N_("read"),
        "train_rows": N_("trained on"),
        "validation_rows": N_("validated on"),
        "dropped_no_text": N_("left out, no text"),
        "dropped_no_label": N_("left out, no label"),
        "duplicates_across_split": N_("validation texts also trained on"),
        "contradicting_rows": N_("same text, other label"),
        "text_column": N_("text column"),
        "text_pair_column": N_("second text column"),
        "label_column": N_("label column"),
        "group_column": N_("group column"),
        "groups": N_("groups"),
        "encoding": N_("encoding"),
    },
}
"""What a reader calls components, metrics, settings and the keys of a run's summary.

Strategies have their titles here once more: reading those from the strategies would import torch.
"""

FIDELITY_SENTENCES = {
    "exact": N_("exact, the same numbers up to rounding of the same precision"),
    "rounding": N_("rounding, the same algorithm with fewer bits"),
    "optimizer": N_("optimizer, another update rule"),
    "capacity": N_("capacity, fewer weights are trained"),
    "data": N_("data, texts are cut shorter"),
}

UNUSED = "unused"
"""What the allocator holds beyond the components."""

_SHORT = {long: short for short, long in SHORT_NAMES.items()}


_AVERAGED = {
    "given": N_("F1, precision and recall are those of {positive}."),
    "rarer": N_(
        "F1, precision and recall are those of {positive}, the rarer class; --positive-label names "
        "another."
    ),
    "tie_called": N_(
        "F1, precision and recall are those of {positive}: both classes have equally many rows, "
        "and this one is called positive; --positive-label names another."
    ),
    "tie_last": N_(
        "F1, precision and recall are those of {positive}: both classes have equally many rows, "
        "and this one stands last; --positive-label names another."
    ),
    "trained": N_(
        "F1, precision and recall are those of {positive}, as in the training; --positive-label "
        "names another."
    ),
    "name": N_(
        "F1, precision and recall are those of {positive}; --positive-label names another class."
    ),
    "imbalance": N_(
        "F1, precision and recall are means over both classes, since one has more than ten times "
        "the rows of the other."
    ),
    "macro": N_("F1, precision and recall are means over the classes."),
    "micro": N_(
        "F1 (macro) is the mean over the labels; F1, precision and recall count every label of "
        "every row; accuracy counts the rows with all labels right."
    ),
}


def averaging_sentence(averaging: str, positive: str = "", why: str = "") -> str:
    """What F1, precision and recall are of, and why; empty where there are none."""
    kind = why or {"binary": "given"}.get(averaging, averaging)
    return t(_AVERAGED[kind], positive=clean(positive)) if kind in _AVERAGED else ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing with what stands beside it; `legend` is (css class, name)."""

    svg: str
    caption: str
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""
    hover: str = ""
    """As JSON: where the axes lie and which points the lines have."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows of text; the first cell of each is its name. Without a head it is a list of facts."""

    caption: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    numbers: bool = True
    """Whether all cells but the first are numbers."""


def number(value: object) -> str:
    """A value for a table: thousands separated, floats short, nothing as a dash."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return t("yes") if value else t("no")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return clean(value)


def metric(value: float | None) -> str:
    """0.9340, 12.71; a dash for what is not a number."""
    if value is None:
        return "–"
    return f"{value:.4f}" if abs(value) <= 1 else f"{value:.4g}"


def together(sentences: Sequence[str]) -> str:
    """One after the other; Chinese ones follow without a space."""
    return " ".join(sentences).replace("。 ", "。")


def named(group: str, name: str) -> str:
    """What a person calls it, where there is a word for it; else its own name."""
    known = _NAMES[group].get(name)
    return clean(name).replace("_", " ") if known is None else t(known)


def setting_name(name: str) -> str:
    """What a person calls a setting; else the flag that gives it."""
    for group in ("setting", "training", "count"):
        if name in _NAMES[group]:
            return named(group, name)
    return "--" + clean(_SHORT.get(name, name)).replace("_", "-")
