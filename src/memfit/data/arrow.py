"""Parquet files and datasets of the Hub: tables that know their own types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memfit.data.tables import Row, Table
from memfit.data.workspace import quiet_logs
from memfit.errors import DataError
from memfit.messages import t

_BATCH_ROWS = 2000
_VALIDATION_SPLITS = ("validation", "valid", "dev")


def open_parquet(path: Path) -> Table:
    """The table in a .parquet file; columns that are not asked for are not read."""
    import pyarrow
    from datasets import Features
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        reason = _first_line(error)
        raise DataError(
            t("{path} is not a Parquet file ({reason}); write it again", path=path, reason=reason)
        ) from None
    class_names = _class_names(Features.from_arrow_schema(schema))

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(_BATCH_ROWS, columns=list(wanted)):
                    columns = [batch.column(name).to_pylist() for name in wanted]
                    yield from _named(zip(*columns, strict=True), wanted, class_names)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                t(
                    "{path} cannot be read to its end ({reason}); write it again",
                    path=path,
                    reason=_first_line(error),
                )
            ) from None

    return Table(str(path), tuple(schema.names), read, class_names)


def open_hub(name: str) -> tuple[Table, Table | None]:
    """A dataset of the Hub ('owner/name', 'owner/name:config'): training, own validation or none.

    Its test split is left alone: it is not ours to train on or to choose a model with.
    """
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        with quiet_logs():  # the bars stay: a download may take long
            found = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # every layer below (hub, http, builder) raises its own kinds
        said = {"name": repr(name), "reason": _first_line(error)}
        raise DataError(
            t(
                "{name} is neither a file here nor a dataset the Hub gives ({reason}); check "
                "the spelling and the connection",
                **said,
            )
        ) from error
    train = found["train"] if "train" in found else next(iter(found.values()))
    validation = next((found[split] for split in _VALIDATION_SPLITS if split in found), None)
    if validation is train:
        validation = None
    return (
        _hub_table(f"{name} (training split)", train),
        None if validation is None else _hub_table(f"{name} (validation split)", validation),
    )


def _hub_table(where: str, dataset: Any) -> Table:
    class_names = _class_names(dataset.features)

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for batch in dataset.select_columns(list(wanted)).iter(_BATCH_ROWS):
            columns = [batch[name] for name in wanted]
            yield from _named(zip(*columns, strict=True), wanted, class_names)

    return Table(where, tuple(dataset.column_names), read, class_names)


def _class_names(features: Any) -> dict[str, tuple[str, ...]]:
    """The label names that `datasets` keeps with a column or with the items of its lists."""
    from datasets import ClassLabel

    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {
        name: tuple(feature.names)
        for name, feature in inner.items()
        if isinstance(feature, ClassLabel)
    }


def _named(
    rows: Iterator[Row], wanted: Sequence[str], class_names: dict[str, tuple[str, ...]]
) -> Iterator[Row]:
    """The rows with declared ids replaced by their names."""
    names = [class_names.get(name) for name in wanted]
    if not any(names):
        yield from rows
        return
    for row in rows:
        yield tuple(
            value if known is None else _name_of(value, known)
            for value, known in zip(row, names, strict=True)
        )


def _name_of(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_name_of(item, names) for item in value]
    # -1 is how the Hub's benchmarks write a label that is kept secret.
    return None if value is None or value < 0 else names[value]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
