"""One configuration for the command line, the TOML file and the Python call.

Every value has one name everywhere. `RunConfig.build` takes them flat (`max_length=64,
learning_rate=3e-5`), a TOML file keeps them in the tables [data], [model] and [training];
what is given by hand wins over the file, the file over the default.

The checks are our own: with pydantic the translated sentences and the nearest names stay ours too,
so it saves hardly a line and takes 60 to 140 ms of every start.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from memfit._compat import OLD_FIELDS, modernize
from memfit.config import files
from memfit.config.training_fields import (
    MEANT,
    SECRET_FIELDS,
    SHORT_NAMES,
    check_seed,
    training_fields,
)
from memfit.errors import ConfigError, nearest
from memfit.i18n import N_, NP_, t
from memfit.units import parse_budget

TASKS = ("auto", "single_label", "multi_label", "regression")
DTYPES = ("float32", "bfloat16", "float16")
ON_NAN = ("stop", "skip")

ALLOWABLE = ("optimizer", "lora", "freeze", "truncate")
"""What lowers a plan's fidelity below `rounding`, by the name it is allowed by."""

FIDELITY_NAMES: Mapping[str, str] = {
    "exact": N_("exact"),
    "rounding": N_("rounding"),
    "optimizer": NP_("fidelity", "optimizer"),
    "capacity": N_("capacity"),
    "data": NP_("fidelity", "data"),
}
"""What a plan does to the result, best first, and what a reader calls it."""

_LONGEST_NAME = 255
_LONGEST_TEXT = 10**6

DATA_SOURCES = (
    "A CSV, TSV, Excel, JSONL or Parquet file, a folder of class folders, or a Hub dataset id"
)

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def option(help: str, **default: Any) -> Any:  # noqa: A002 (the name argparse and typer use)
    """A field whose help is the command line's help."""
    return field(metadata={"help": help}, **default)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the texts and labels are, and how they are read."""

    path: str = option(f"{DATA_SOURCES}.")
    validation_file: str | None = option("A separate validation table.", default=None)
    text_column: str | None = option(
        "The column of texts; found by name if not given.", default=None
    )
    text_pair_column: str | None = option("The second text of a pair.", default=None)
    label_column: str | None = option(
        "The column of labels, or several separated by commas; found by name if not given.",
        default=None,
    )
    label_names: Mapping[str, str] = option(
        "Names for the labels: 0=negative 1=positive.", default_factory=dict
    )
    positive_label: str | None = option(
        "Of two classes the one F1, precision and recall are of; the rarer one if not given.",
        default=None,
    )
    task: str = option(f"One of {', '.join(TASKS)}.", default="auto")
    group_column: str | None = option(
        "Rows with the same value here stay on one side of the split.", default=None
    )
    validation_split: float = option("The share of rows held out to validate.", default=0.1)
    max_length: int = option("Texts longer than this many tokens are cut.", default=128)
    encoding: str | None = option("The file's encoding; found if not given.", default=None)
    header: bool | None = option(
        "Whether the first line names the columns; without it they are 1, 2, 3. Found if not "
        "given.",
        default=None,
    )
    seed: int = option("The seed of the split (and of the training).", default=42)

    @classmethod
    def build(cls, **options: Any) -> DataConfig:
        """From options as the command line gives them; None was not given."""
        return _construct(cls, options)

    def __post_init__(self) -> None:
        _check_choice("task", self.task, TASKS)
        _check_path(t("the data file"), self.path)
        _check_path("--validation-file", self.validation_file)
        check_seed("--seed", self.seed)
        if self.max_length > _LONGEST_TEXT:
            said = {"flag": "--max-length", "value": self.max_length, "most": _LONGEST_TEXT}
            raise ConfigError("{flag} is {value}; write {most} or less", **said)
        if not 0 < self.validation_split < 1:
            raise ConfigError(
                "--validation-split is {share}; write a share between 0 and 1, such as 0.1",
                share=self.validation_split,
            )
        if self.max_length < 2:
            raise ConfigError("--max-length is {length}; write at least 2", length=self.max_length)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained, and which of its weights are trainable."""

    model: str = option("A hub id, modelscope:org/name, or a folder with the model's files.")
    from_scratch: bool = option("Train from random weights.", default=False)
    freeze: str | None = option(
        "Weights to freeze: encoder, embeddings, or a number of layers.", default=None
    )
    lora: int | None = option("Train LoRA adapters of this rank only.", default=None)
    attn_implementation: str | None = option(f"One of {', '.join(ATTENTION)}.", default=None)
    dtype: str | None = option(
        f"The weights' type: {', '.join(DTYPES)} (float32 if not given).", default=None
    )
    trust_remote_code: bool = option("Run code that comes with the model.", default=False)

    @classmethod
    def build(cls, **options: Any) -> ModelConfig:
        """From options as the command line gives them; None was not given."""
        return _construct(cls, options)

    def __post_init__(self) -> None:
        _check_path("--model", self.model)
        if self.freeze is not None and not (
            self.freeze in ("encoder", "embeddings") or self.freeze.isdecimal()
        ):
            raise ConfigError(
                "--freeze is {value}; write encoder, embeddings, or a number of layers",
                value=repr(self.freeze),
            )
        if self.lora is not None and self.lora < 1:
            raise ConfigError("--lora is {rank}; write a rank such as 8", rank=self.lora)
        if self.lora is not None and self.freeze is not None:
            raise ConfigError(
                "--lora {rank} and --freeze {freeze} do not go together: LoRA freezes all "
                "but its adapters and the head already; leave --freeze out",
                rank=self.lora,
                freeze=self.freeze,
            )
        if self.dtype is not None:
            _check_choice("dtype", self.dtype, DTYPES)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run; `training` holds TrainingArguments' fields under their own names."""

    data: DataConfig
    model: ModelConfig
    output_dir: str | None = option("The folder the result is written to.", default=None)
    budget: str = option("Device memory: 4GB, 4GiB, 80% or auto.", default="auto")
    gpus: str | None = option(
        "How many GPUs to train on: a number, or auto for all; on a CPU so many processes.",
        default=None,
    )
    plan: str | None = option("A plan.toml to train by, as memfit plan wrote it.", default=None)
    exact: bool = option(
        "Only exact plans: the same numbers in the precision you chose, no fewer bits.",
        default=False,
    )
    allow: str = option(f"What plans may change besides: any of {','.join(ALLOWABLE)}.", default="")
    on_nan: str = option(
        "What a loss that is not a finite number does: stop the run, or skip the update.",
        default="stop",
    )
    class_weights: Mapping[str, float] | str | None = option(
        "What a row of each class counts in the loss: balanced, or by name, 0=1,1=5.", default=None
    )
    threshold: float | str | None = option(
        "The probability from which a text has a label: a number, or auto to tune it on the "
        "validation rows.",
        default=None,
    )
    early_stopping: int | None = option(
        "Stop after this many evaluations without a better one.", default=None
    )
    training: Mapping[str, Any] = field(default_factory=dict)
    named_plan: Mapping[str, Any] = field(default_factory=dict)
    """The plan an earlier run made for these settings: [plan] in its run.toml."""

    def __post_init__(self) -> None:
        if self.early_stopping is not None and self.early_stopping < 1:
            said = {"flag": "--early-stopping", "value": self.early_stopping}
            raise ConfigError("{flag} is {value}; write a whole number from 1 on", **said)
        _check_path("--output-dir", self.output_dir)
        parse_budget(self.budget)
        if self.gpus not in (None, "auto") and not re.fullmatch("[1-9][0-9]*", self.gpus):
            raise ConfigError(
                "--gpus is {gpus}; write a number such as 2, or auto", gpus=repr(self.gpus)
            )
        _check_choice("on_nan", self.on_nan, ON_NAN)
        for name in sorted(self.allowed):
            _check_choice("allow", name, ALLOWABLE)
        if self.exact and self.allow:
            raise ConfigError(
                "--exact and --allow {allow} exclude each other; choose one", allow=self.allow
            )
        if self.plan is not None and (self.exact or self.allow):
            raise ConfigError("--exact and --allow are for making a plan, and --plan gives one")

    @property
    def allowed(self) -> frozenset[str]:
        """What plans may change, by name."""
        return frozenset(name for name in re.split(r"[,\s]+", self.allow) if name)

    @classmethod
    def build(cls, config: str | os.PathLike[str] | None = None, **options: Any) -> RunConfig:
        """From flat options over a TOML file; an option that is None was not given."""
        tables = _read_tables(Path(config)) if config is not None else _empty_tables()
        for key, value in options.items():
            if value is not None:
                _place(tables, key.replace("-", "_"), value)
        training, notes = modernize(tables["training"])
        for note in notes:
            warnings.warn(note, FutureWarning, stacklevel=2)
        top = {key: _coerce(cls, key, value) for key, value in tables[""].items()}
        return cls(
            data=_construct(DataConfig, tables["data"]),
            model=_construct(ModelConfig, tables["model"]),
            training=training,
            named_plan=tables.get("plan", {}) if top.get("plan") is None else {},
            **top,
        )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> RunConfig:
        """The run a TOML file describes."""
        return cls.build(path)

    def to_tables(self) -> dict[str, Any]:
        """Plain values, without what was not given and without secrets."""
        tables: dict[str, Any] = {"budget": self.budget}
        if self.output_dir is not None:
            tables["output_dir"] = self.output_dir
        for name in (
            "gpus", "on_nan", "plan", "exact", "allow", "class_weights", "threshold",
            "early_stopping",
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in ("stop", None, False, ""):
                tables[name] = value
        for name, part in (("data", self.data), ("model", self.model)):
            tables[name] = {
                item.name: value
                for item in fields(part)
                if (value := getattr(part, item.name)) not in (None, {})
            }
        tables["training"] = {
            key: value
            for key, value in self.training.items()
            if value is not None and key not in SECRET_FIELDS
        }
        if self.named_plan:
            tables["plan"] = self.named_plan
        return tables

    def to_toml(self) -> str:
        """The TOML that `from_toml` reads back to an equal configuration."""
        return files.dump_toml(self.to_tables())

    @property
    def asked(self) -> RunConfig:
        """The settings alone, without the plan that was made for them."""
        return dataclasses.replace(self, named_plan={})

    def settings_digest(self) -> str:
        """Changes with every setting but the output folder, and so with all a plan follows from."""
        written = tomllib.loads(dataclasses.replace(self.asked, output_dir=None).to_toml())
        return files.cache_digest(written)

    def differences(self, other: RunConfig) -> list[str]:
        """What differs, one 'name: mine, not theirs' each."""
        mine, theirs = _flatten(self.to_tables()), _flatten(other.to_tables())
        unset = t("not set")
        return [
            t("{key}: {mine}, not {theirs}", key=key, mine=mine.get(key, unset), theirs=theirs[key])
            if key in theirs
            else t("{key}: {mine}, which was not set", key=key, mine=mine[key])
            for key in dict.fromkeys([*mine, *theirs])
            if mine.get(key) != theirs.get(key)
        ]


_Part = TypeVar("_Part", DataConfig, ModelConfig)
_TABLES: Mapping[str, type] = {"": RunConfig, "data": DataConfig, "model": ModelConfig}
_ALIASES: Mapping[str, str] = {"data": "path", **SHORT_NAMES}


def own_fields(table: str) -> dict[str, str]:
    """The fields of one of our tables, with their help; "" is the top level."""
    return {
        item.name: item.metadata["help"]
        for item in fields(_TABLES[table])
        if "help" in item.metadata
    }


def _empty_tables() -> dict[str, dict[str, Any]]:
    return {"": {}, "data": {}, "model": {}, "training": {}}


def _read_tables(path: Path) -> dict[str, dict[str, Any]]:
    tables = _empty_tables()
    for key, value in files.read_toml(path).items():
        if key == "plan" and isinstance(value, dict):  # the plan itself, not its file
            tables[key] = value
            continue
        if key in tables and not isinstance(value, dict):
            raise ConfigError(
                "{path}: {key} is a table; write its values under [{key}]", path=path, key=key
            )
        if key not in tables:
            if key not in own_fields(""):
                said = {"path": path, "key": repr(key), "hint": _suggest(key)}
                raise ConfigError("{path}: unknown key {key}.{hint}", **said)
            tables[""][key] = value
            continue
        known = training_names() if key == "training" else frozenset(own_fields(key))
        for raw, inner in value.items():
            name = raw.replace("-", "_")
            name = _ALIASES[name] if _ALIASES.get(name) in known else name
            if name not in known:
                said = {"path": path, "key": repr(raw), "table": key, "hint": _suggest(raw)}
                raise ConfigError("{path}: unknown key {key} in [{table}].{hint}", **said)
            tables[key][name] = inner
    return tables


def _place(tables: dict[str, dict[str, Any]], key: str, value: Any) -> None:
    """Puts one flat option into its table; `seed` belongs to the split and the training."""
    key = _ALIASES.get(key, key)
    if key == "allow" and isinstance(value, list | tuple | set | frozenset):
        value = ",".join(sorted(value))
    if key == "label_names" and value in ("labels", ["labels"], ("labels",)):
        # TrainingArguments' own field of that name: the columns that hold labels, of which
        # a table read by memfit has this one.
        tables["training"][key] = ["labels"]
        return
    for table in ("", "data", "model"):
        if key in own_fields(table):
            tables[table][key] = value
            if key == "seed":
                tables["training"][key] = value
            return
    if key not in training_names():
        raise ConfigError("unknown option {key}.{hint}", key=repr(key), hint=_suggest(key))
    tables["training"][key] = value


def training_names() -> frozenset[str]:
    """Every name [training] may hold: today's fields and those of older transformers."""
    return frozenset(training_fields()) | OLD_FIELDS


def _suggest(name: str) -> str:
    own = [key for table in _TABLES for key in own_fields(table)]
    name = name.replace("-", "_")
    return nearest(MEANT.get(name, name), [*own, *_ALIASES, *sorted(training_names())])


def _construct(kind: type[_Part], options: Mapping[str, Any]) -> _Part:
    values = {key: value for key, value in options.items() if value is not None}
    known = [item.name for item in fields(kind)]
    for key in values:
        if key not in known:
            hint = nearest(key, known)
            raise ConfigError("unknown option {key}.{hint}", key=repr(key), hint=hint)
    for item in fields(kind):
        required = item.default is dataclasses.MISSING
        if required and item.default_factory is dataclasses.MISSING and item.name not in values:
            if item.name == "path":
                raise ConfigError("no data file given; see --help for how to name it")
            raise ConfigError("no {what} given; see --help for how to name it", what=item.name)
    return kind(**{key: _coerce(kind, key, value) for key, value in values.items()})


def _coerce(kind: type, key: str, value: Any) -> Any:
    """The value as its field's type, or a ConfigError; numbers are never read from words."""
    wanted = typing.get_type_hints(kind)[key]
    types = set(typing.get_args(wanted) or (wanted,))
    if key == "label_names":
        return _label_names(value)
    if key == "class_weights":
        return _class_weights(value)
    if key == "threshold":
        return _threshold(value)
    if bool in types and isinstance(value, bool):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if int in types:
            return value
        if float in types:
            return float(value)
    if float in types and isinstance(value, float) and math.isfinite(value):
        return value
    if str in types and isinstance(value, (str, int, os.PathLike)) and not isinstance(value, bool):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if value is None and type(None) in types:
        return None
    names = " or ".join(sorted(item.__name__ for item in types if item is not type(None)))
    raise ConfigError(
        "{key} is {value}; it takes a value of type {types}",
        key=key,
        value=repr(value),
        types=names,
    )


def _label_names(value: Any) -> dict[str, str]:
    """From a mapping, or from '0=negative' items as the command line gives them."""
    if isinstance(value, Mapping):
        return {str(key): str(name) for key, name in value.items()}
    names: dict[str, str] = {}
    if not isinstance(value, (str, list, tuple)):
        raise ConfigError(
            "label_names is {value}; write label=name, such as 0=negative", value=repr(value)
        )
    for item in [value] if isinstance(value, str) else value:
        label, sign, name = str(item).partition("=")
        if not (sign and label and name):
            raise ConfigError(
                "label_names has {value}; write label=name, such as 0=negative", value=repr(item)
            )
        if names.setdefault(label.strip(), name.strip()) != name.strip():
            raise ConfigError(
                "label_names names {label} twice; write each label once", label=repr(label.strip())
            )
    return names


def _class_weights(value: Any) -> dict[str, float] | str | None:
    """balanced, or a mapping, or '0=1,1=5' as the command line gives it."""
    if value is None or value == "balanced":
        return value  # type: ignore[no-any-return]
    parts = re.split("[,，]", value) if isinstance(value, str) else []
    items = [part.rpartition("=")[::2] for part in parts]
    given = list(value.items()) if isinstance(value, Mapping) else items
    weights = {str(label).strip(): _number(weight) for label, weight in given}
    # A batch in which no row counts could not be learned from.
    if not all(label and 0 < weight < math.inf for label, weight in weights.items()) or (
        not weights and not isinstance(value, Mapping)
    ):
        raise ConfigError(
            "--class-weights is {value}; write balanced, or labels with a weight above 0, such as "
            "0=1,1=5",
            value=repr(value),
        )
    return weights


def _number(value: Any) -> float:
    """The number written there; nan where none is."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _threshold(value: Any) -> float | str | None:
    if value is None or value == "auto":
        return value  # type: ignore[no-any-return]
    number = _number(value)
    if not 0 < number < 1:  # also refuses nan
        raise ConfigError(
            "--threshold is {value}; write auto, or a number between 0 and 1", value=repr(value)
        )
    return number


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        hint = nearest(value, choices)
        flag = "--" + key.replace("_", "-")
        said = {"flag": flag, "value": repr(value), "choices": ", ".join(choices), "hint": hint}
        raise ConfigError("{flag} is {value}; it is one of {choices}.{hint}", **said)


def _check_path(what: str, path: str | None) -> None:
    """Names that no file system takes, before one is asked in many places."""
    if path is None:
        return
    if not path.strip() or "\0" in path:
        raise ConfigError(
            "{what} is {path}, which is no name; write a path", what=what, path=repr(path)
        )
    if any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in path.split("/")):
        raise ConfigError(
            "{what} begins with {path} and is too long a name; check it",
            what=what,
            path=repr(path[:40]),
        )


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
