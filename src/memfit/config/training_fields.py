"""The fields of TrainingArguments, memfit's defaults for them, and what a run makes of both.

Importing transformers' arguments costs seconds; a misspelt flag should not. The class body is
parsed instead.

| field | memfit | TrainingArguments |
|---|---|---|
| per_device_train_batch_size | 32 | 8 |
| per_device_eval_batch_size | 64 | 8 |
| learning_rate | 2e-5 | 5e-5 |
| eval_strategy | epoch | no |
| save_strategy | as eval_strategy | steps |
| save_total_limit | 3 | none |
| load_best_model_at_end | where saving and evaluating go together | no |
| metric_for_best_model | f1, for several labels f1_macro, for a regression mse | loss |
| logging_steps | 2 % of the steps | 500 |
| dataloader_pin_memory | with a GPU | yes |

eval_steps or save_steps make both strategies "steps", unless you give one. Where the whole
encoder is frozen the learning rate is 1e-3, unless you give one.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from memfit.errors import ConfigError, MemfitError, nearest
from memfit.i18n import N_, pt, t

if TYPE_CHECKING:
    from memfit.config.training_arguments import TrainingArguments

SHORT_NAMES: Mapping[str, str] = {
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
}
"""Our short names for the longest fields."""

MEANT: Mapping[str, str] = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "max_len": "max_length",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "num_epochs": "epochs",
    "val_split": "validation_split",
    "warmup": "warmup_steps",
}
"""What other programs call our options; a wrong name is answered with ours."""

SECRET_FIELDS = frozenset({"hub_token", "push_to_hub_token"})
"""Fields that are never written to a file."""


@functools.cache
def training_fields() -> Mapping[str, str]:
    """TrainingArguments' fields with their annotations as written, in order."""
    spec = importlib.util.find_spec("transformers")
    (folder,) = spec.submodule_search_locations if spec else ()  # type: ignore[misc]
    tree = ast.parse((Path(folder) / "training_args.py").read_text(encoding="utf-8"))
    (body,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    )
    return {
        item.target.id: ast.unparse(item.annotation)
        for item in body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
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


DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 2e-5,
    "eval_strategy": "epoch",
    "save_total_limit": 3,
    "logging_steps": 0.02,
}

HEAD_LEARNING_RATE = 1e-3
"""At 2e-5 a fresh head on a frozen encoder learns nothing (benchmarks/quality.py)."""

METRICS: Mapping[str, tuple[str, ...]] = {
    "single_label": ("accuracy", "f1", "precision", "recall"),
    "multi_label": ("accuracy", "f1", "f1_macro", "precision", "recall"),
    "regression": ("mse", "mae", "r2", "pearson"),
}
"""What an evaluation measures, and `metric_for_best_model` may name beside the loss."""

_ONE_OF = re.compile(r"'?(.+?)'? is not a valid (\w+), please select one of (\[.+\])", re.S)


def training_arguments(
    training: Mapping[str, Any],
    output_dir: Path,
    best_metric: str,
    *,
    head_only: bool = False,
    task: str | None = None,
) -> TrainingArguments:
    """The Trainer's arguments, or a ConfigError that names what they refuse."""
    check_training(training, task)
    import torch

    from memfit.config.training_arguments import TrainingArguments

    fields = with_defaults(training, best_metric)
    if head_only and "learning_rate" not in training:
        fields["learning_rate"] = HEAD_LEARNING_RATE
    fields.setdefault("dataloader_pin_memory", torch.cuda.is_available())
    try:
        arguments = TrainingArguments(output_dir=str(output_dir), **fields)
        _try_out(arguments, training)
    except MemfitError:
        raise
    except Exception as error:
        reason = _refusal(str(error).strip() or type(error).__name__)
        raise ConfigError(
            "TrainingArguments refuses what was given: {reason}", reason=reason
        ) from None
    _check_trackers(list(arguments.report_to or ()))
    return arguments


def _try_out(arguments: TrainingArguments, training: Mapping[str, Any]) -> None:
    """Has transformers refuse an optimizer or a scheduler now, not when the model is loaded."""
    if "optim" in training:
        from transformers import Trainer

        Trainer.get_optimizer_cls_and_kwargs(arguments)
    if "lr_scheduler_kwargs" in training:
        import torch
        from transformers import get_scheduler

        get_scheduler(
            arguments.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)]),
            num_warmup_steps=0,
            num_training_steps=1,
            scheduler_specific_kwargs=cast(dict[str, Any], arguments.lr_scheduler_kwargs),
        )


def _check_trackers(names: list[str]) -> None:
    """Services the log goes to: known ones, and installed."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    known: Mapping[str, Any] = INTEGRATION_TO_CALLBACK
    for name in set(names) - {"none", "all"}:
        if name not in known:
            raise ConfigError(
                "--report-to is {name}; it is none, all, or some of {known}.{hint}",
                name=repr(name),
                known=", ".join(sorted(known)),
                hint=nearest(name, known),
            )
        try:
            known[name]()
        except Exception as error:
            reason = _refusal(str(error).strip() or type(error).__name__)
            raise ConfigError(
                "--report-to {name} does not work here: {reason}", name=name, reason=reason
            ) from None


_FLAGS = {"per_device_train_batch_size": "batch_size"}

_BOUNDS: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (
        ("logging_steps", "eval_steps", "save_steps"),
        lambda value: value > 0,
        N_("{flag} is {value}; write more than 0"),
    ),
    (
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ),
        lambda value: value >= 1,
        N_("{flag} ({name}) is {value}; write 1 or more"),
    ),
    (
        ("learning_rate", "weight_decay", "adam_epsilon"),
        lambda value: value >= 0,
        N_("{flag} is {value}; write 0 or more"),
    ),
    (
        ("adam_beta1", "adam_beta2"),
        lambda value: 0 <= value < 1,
        N_("{flag} is {value}; write a number from 0 to below 1"),
    ),
    (
        ("max_steps",),
        lambda value: value != 0,
        N_("{flag} is {value}; write 1 or more, or leave it out to train --epochs"),
    ),
)
"""What the Trainer or its optimizer would refuse only once the model is loaded."""


def check_training(training: Mapping[str, Any], task: str | None = None) -> None:
    """What would train nothing, or fail only after the first epoch."""
    for name, value in training.items():
        if wanted := wanted_type(name, value):
            raise ConfigError(
                "{name} is {value}; it takes {wanted}", name=name, value=repr(value), wanted=wanted
            )
    for names, accepts, sentence in _BOUNDS:
        for name in names:
            value = training.get(name)
            if isinstance(value, int | float) and not accepts(value):
                flag = "--" + _FLAGS.get(name, name).replace("_", "-")
                raise ConfigError(sentence, flag=flag, name=name, value=value)
    for kind in ("logging", "eval", "save"):
        strategy = _value(training.get(f"{kind}_strategy", "steps"))
        if training.get(f"{kind}_steps") is not None and strategy != "steps":
            raise ConfigError(
                "--{kind}-steps is {steps}, and --{kind}-strategy {strategy} takes no notice "
                "of it; leave one of them out",
                kind=kind,
                steps=training[f"{kind}_steps"],
                strategy=strategy,
            )
    if training.get("prediction_loss_only") or training.get("eval_do_concat_batches") is False:
        name = "prediction_loss_only"
        flag = "--prediction-loss-only" if training.get(name) else "--no-eval-do-concat-batches"
        raise ConfigError(
            "{flag} leaves out predictions that memfit scores after training; leave it out, or use "
            "memfit.BudgetTrainer",
            flag=flag,
        )
    steps = training.get("max_steps")
    by_steps = isinstance(steps, int) and steps > 0
    epochs = training.get("num_train_epochs")
    if isinstance(epochs, int | float) and not (epochs > 0 or by_steps):
        raise ConfigError(
            "--epochs (num_train_epochs) is {value}; write more than 0, such as 3", value=epochs
        )
    for name in ("seed", "data_seed"):
        if training.get(name) is not None:
            check_seed(f"--{name.replace('_', '-')}", training[name])
    metric = training.get("metric_for_best_model")
    known = ("loss", *METRICS[task]) if task is not None else ()
    if known and isinstance(metric, str) and metric.removeprefix("eval_") not in known:
        hint = nearest(metric.removeprefix("eval_"), known)
        said = {"value": repr(metric), "known": ", ".join(known), "hint": hint}
        raise ConfigError(
            "--metric-for-best-model is {value}; this task's are {known}.{hint}", **said
        )


def _refusal(text: str) -> str:
    """The first line; of a value that is none of forty, the nearest."""
    found = _ONE_OF.search(text)
    if found is None:
        return text.splitlines()[0]
    value, kind, listed = found.groups()
    choices = re.findall(r"'([^']+)'", listed)
    hint = nearest(value, choices)
    if not hint and len(choices) < 9:
        hint = t(" It is one of {choices}.", choices=", ".join(choices))
    return t("{value} is not one of its {kind}.{hint}", value=repr(value), kind=kind, hint=hint)


def with_defaults(training: Mapping[str, Any], best_metric: str) -> dict[str, Any]:
    """Fields that belong together follow the one the user set."""
    fields = {**DEFAULTS, **training}
    if "eval_strategy" not in training:
        if "save_steps" in training and "save_strategy" not in training:
            # The best model is chosen among those that are both evaluated and saved.
            fields.setdefault("eval_steps", training["save_steps"])
        if fields.get("eval_steps") is not None:
            fields["eval_strategy"] = "steps"
    evaluates = _value(fields["eval_strategy"])
    if "save_strategy" not in fields:
        # Without evaluation there are still checkpoints, for --resume.
        fields["save_strategy"] = "epoch" if evaluates == "no" else evaluates
        if "save_steps" in training:
            fields["save_strategy"] = "steps"
    if fields.get("eval_steps") is not None:
        fields.setdefault("save_steps", fields["eval_steps"])
    together = evaluates != "no" and _value(fields["save_strategy"]) in (evaluates, "best")
    fields.setdefault("load_best_model_at_end", together)
    if fields["load_best_model_at_end"] or _value(fields["save_strategy"]) == "best":
        fields.setdefault("metric_for_best_model", best_metric)
    return fields


def _value(strategy: Any) -> str:
    """A strategy as it is written; transformers has enumerations of them."""
    return str(getattr(strategy, "value", strategy))


def check_seed(flag: str, seed: object) -> None:
    """What torch, numpy and Python's own generator all take."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigError(
            "{flag} is {seed}; write a whole number from 0 to {most}",
            flag=flag,
            seed=repr(seed),
            most=2**32 - 1,
        )
