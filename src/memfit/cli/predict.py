"""`memfit predict`: labels for sentences, or for every row of a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli import console
from memfit.cli.flags import PlainCommand
from memfit.cli.options import Json
from memfit.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from memfit.inference import Prediction

FORMATS = (".csv", ".tsv", ".jsonl")
Text = str | tuple[str, str]


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(cls=PlainCommand)(predict)


def predict(
    model: Annotated[str, typer.Argument(help="An output folder or a hub id.")],
    texts: Annotated[list[str] | None, typer.Argument(help="The sentences to label.")] = None,
    file: Annotated[
        str | None, typer.Option(help="A table of texts instead: CSV, TSV, JSONL, Parquet.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Write texts, labels and scores here: .csv, .tsv, .jsonl.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of texts.")] = None,
    text_pair_column: Annotated[str | None, typer.Option(help="The pair's second text.")] = None,
    encoding: Annotated[str | None, typer.Option(help="The file's encoding.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut texts here; where the training did if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Label sentences, or every row of a file."""
    if bool(texts) == (file is not None):
        raise ConfigError("give either sentences or --file, not both and not neither")
    target = _check_target(output) if output is not None else None
    with console.only_results_on_stdout():
        asked: Sequence[Text] = texts or _read(str(file), text_column, text_pair_column, encoding)
        from memfit import api

        answers = api.load(model, max_length=max_length).predict(asked)
    rows = [_row(text, answer) for text, answer in zip(asked, answers, strict=True)]
    if target is not None:
        _write(target, rows)
        console.say(f"wrote {len(rows):,} rows to {target}")
    if as_json:
        console.show_json(
            [{**row, "scores": answer.scores} for row, answer in zip(rows, answers, strict=True)]
        )
    elif target is None:
        _show(rows)


def _check_target(output: str) -> Path:
    """Refused before the model is loaded, not after an hour of predicting."""
    target = Path(output).expanduser()
    if target.suffix.lower() not in FORMATS:
        raise OutputError(f"cannot write {output}; name a file that ends in {', '.join(FORMATS)}")
    if not target.parent.is_dir():
        raise OutputError(f"cannot write {output}: there is no folder {target.parent}")
    if target.is_dir():
        raise OutputError(f"cannot write {output}: it is a folder")
    return target


def _read(
    path: str, text_column: str | None, text_pair_column: str | None, encoding: str | None
) -> list[Text]:
    from memfit.data import read_texts

    table = read_texts(path, text_column, text_pair_column, encoding)
    if "text_pair" in table.column_names:
        return list(zip(table["text"], table["text_pair"], strict=True))
    return list(table["text"])


def _row(text: Text, answer: Prediction) -> dict[str, Any]:
    first, second = text if isinstance(text, tuple) else (text, None)
    row: dict[str, Any] = {"text": first}
    if second is not None:
        row["text_pair"] = second
    return {**row, "label": answer.label, "score": answer.score}


def _write(target: Path, rows: Sequence[dict[str, Any]]) -> None:
    from memfit.files import atomic_writer, plain

    with atomic_writer(target) as file:
        if target.suffix.lower() == ".jsonl":
            file.writelines(json.dumps(plain(row), ensure_ascii=False) + "\n" for row in rows)
            return
        tab = target.suffix.lower() == ".tsv"
        writer = csv.writer(file, delimiter="\t" if tab else ",", lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([*list(row.values())[:-1], f"{row['score']:.6f}"] for row in rows)


def _show(rows: Iterable[dict[str, Any]]) -> None:
    from memfit.report import terminal

    shown = terminal.table("label", "score", "text")
    shown.columns[2].justify = "left"
    for row in rows:
        text = " / ".join(row[name] for name in ("text", "text_pair") if name in row)
        shown.add_row(
            terminal.clean(row["label"]), f"{row['score']:.4f}", terminal.shorten(text, 60)
        )
    terminal.console().print(shown)
