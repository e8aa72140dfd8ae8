"""The names and types of TrainingArguments' fields, read without importing torch.

Importing transformers' arguments costs seconds; a misspelt flag should not. The class body is
parsed instead, and the import is only the way out should transformers move it elsewhere.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.messages import N_, pt, t

SHORT_NAMES: Mapping[str, str] = {
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
}
"""Our short names for the longest fields."""

SECRET_FIELDS = frozenset({"hub_token", "push_to_hub_token"})
"""Fields that are never written to a file."""


@functools.cache
def training_fields() -> Mapping[str, str]:
    """TrainingArguments' fields with their annotations as written, in order."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        source = Path(folder) / "training_args.py"
        if source.is_file() and (found := _fields_in(source.read_text(encoding="utf-8"))):
            return found
    return _imported_fields()


def _fields_in(source: str) -> dict[str, str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            return {
                item.target.id: ast.unparse(item.annotation)
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and "ClassVar" not in ast.unparse(item.annotation)
            }
    return {}


def _imported_fields() -> dict[str, str]:
    from transformers import TrainingArguments

    return {
        field.name: field.type if isinstance(field.type, str) else str(field.type)
        for field in dataclasses.fields(TrainingArguments)
        if field.init
    }


def is_switch(name: str) -> bool:
    """Whether a flag may stand alone: `--bf16`."""
    return "bool" in training_fields().get(name, "").split("[")[0]


def takes_several(name: str) -> bool:
    """Whether a flag takes several values: `--report-to a b`."""
    return "list[" in training_fields().get(name, "")


_KINDS: Mapping[str, tuple[type, str]] = {
    "bool": (bool, N_("true or false")),
    "int": (int, N_("a whole number")),
    "float": (float, N_("a number")),
    "str": (str, N_("a word")),
    "dict": (dict, N_("a table of names and values")),
    "list": (list, N_("a list")),
}


def wanted_type(name: str, value: Any) -> str:
    """What a field takes, in words, where the value is of another kind; empty where it fits.

    Fields of kinds of transformers' own are left to it.
    """
    annotation = training_fields().get(name, "")
    kinds = {kind.strip().split("[")[0] for kind in annotation.split("|")} - {"None", ""}
    if value is None or not kinds or not kinds <= _KINDS.keys():
        return ""
    fits = any(isinstance(value, _KINDS[kind][0]) for kind in kinds)
    if isinstance(value, bool) and "bool" not in kinds:
        fits = False  # to Python it is a number
    if "float" in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        fits = math.isfinite(value)
    if fits:
        return ""
    words = (t(words) for kind, (_, words) in _KINDS.items() if kind in kinds)
    return functools.reduce(
        lambda first, last: pt("types", "{first} or {last}", first=first, last=last), words
    )
