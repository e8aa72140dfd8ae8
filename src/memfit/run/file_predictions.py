"""Answers for every row of a file: read in windows, shared over ranks, written in the file's order.

No more than a few windows lie in memory, however many rows the file has. Window number i is
predicted by rank i modulo the number of ranks; every rank reads the whole file, which is much
faster than predicting it, and rank 0 writes. So ranks on other machines need the file too, under
the same name, and no disk that they share. A run that was killed goes on from what it has written
(partial_output.py), on the same number of ranks or another.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit._version import __version__
from memfit.config.files import plain, why_not_written
from memfit.data.columns import choose_texts
from memfit.data.reading import as_text, unbroken
from memfit.data.tables import Row, Table
from memfit.data.working_files import RowMeter, progress_bar
from memfit.errors import DataError, OutputError
from memfit.i18n import N_, t
from memfit.run.launching import joined
from memfit.run.partial_output import PartialOutput, partial_output, partial_path
from memfit.waiting import doing, is_told

if TYPE_CHECKING:
    from memfit.engine.ranks import Ranks
    from memfit.run.inference import Classifier, Prediction

WINDOW_ROWS = 4096
"""Rows that are sorted by length and predicted together, and lost when the process is killed."""

CPU_WINDOW_ROWS = 1024
"""The same on a CPU, which takes seconds for so many."""

WINDOW_CHARS = 1 << 24
"""Characters from which a window ends earlier: long texts must not fill the memory."""

JSON_LINES = (".jsonl", ".ndjson")

NOT_WRITTEN = (".xlsx", ".xls", ".ods", ".parquet", ".pq", ".json")


@dataclass(frozen=True, slots=True)
class FilePredictions:
    """What was written where."""

    path: Path
    rows: int
    empty_rows: int
    """Rows without text; their label and score stay empty."""
    label_column: str
    score_column: str
    resumed_rows: int = 0
    """Rows that an earlier run, which was killed, had written."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows as the output holds them; at least one."""

    data: bytes
    rows: int
    empty_rows: int


def predict_file(
    classifier: Classifier,
    table: Table,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    text_columns: tuple[str | None, str | None] = (None, None),
    *,
    batch_tokens: int | None = None,
) -> FilePredictions:
    """Writes every row of the source with its label and score to a CSV, TSV or JSONL file.

    A table begins with a byte-order mark, without which Excel reads it in the machine's own
    encoding and shows Chinese as gibberish; JSONL is plain UTF-8, as its readers expect. On ranks
    other than the first nothing is written, and no rows are counted.
    """
    path = Path(target)
    texts = [name for name in choose_texts(table, *text_columns) if name]
    if twice := [name for name in table.columns if table.columns.count(name) > 1]:
        raise DataError(
            "{where}: several columns are called {name}; rename all but one",
            where=table.where,
            name=repr(twice[0]),
        )
    names = ("label", "score")
    if set(names) & set(table.columns):  # the table's own columns stay
        names = ("predicted_label", "predicted_score")
    form = _Form(path, (*table.columns, *names))
    with doing(t("predicting …")), joined(on_cpu=classifier.on_cpu) as group:
        predictor = _Predictor(classifier, table, texts, form, group, batch_tokens)
        if not group.is_first:
            predictor.send()
            return FilePredictions(path, 0, 0, *names)
        made_from = _made_from(classifier, table, texts, Path(source).expanduser())
        try:
            with partial_output(path, made_from, form.head()) as out:
                if out.resumed_rows:
                    _say(t("going on from row {row}", row=f"{out.resumed_rows + 1:,}"))
                elif out.differs:
                    _say(t(_DIFFERS[out.differs], path=partial_path(out.path)))
                predictor.write(out)
        except OSError as error:
            if error.strerror is None or not partial_path(path).exists():
                why = error.strerror or error
                raise OutputError("cannot write {path}: {reason}", path=path, reason=why) from None
            raise OutputError(
                "cannot write {path}: {reason}; the same command goes on where it stopped",
                path=path,
                reason=why_not_written(error, path.parent),
            ) from None
    done = out.complete
    return FilePredictions(path, done.rows, done.empty_rows, *names, out.resumed_rows)


@dataclass(frozen=True)
class _Predictor:
    """Turns windows of rows into pieces of the output."""

    classifier: Classifier
    table: Table
    texts: list[str]
    form: _Form
    group: Ranks
    batch_tokens: int | None

    def write(self, out: PartialOutput) -> None:
        """Writes the pieces of all ranks, from the row on that the output has come to."""
        first_row = self.group.share(lambda: out.complete.rows)
        if out.total_rows is None and is_told():
            # Reading is much faster than predicting, and the bar has an end.
            with doing(t("reading the table …")):
                out.total_rows = sum(1 for _ in self.table.read(self.texts))
        left = None if out.total_rows is None else out.total_rows - first_row
        alone = self.group.is_alone
        try:
            with row_bar(left) as update:
                for piece in self._pieces(first_row, update if alone else lambda _: None):
                    out.add(piece.data, piece.rows, piece.empty_rows)
                    if not alone:
                        update(piece.rows)
        except KeyboardInterrupt:
            row = f"{out.complete.rows:,}"
            _say(t("stopped after row {row}; the same command goes on there", row=row))
            raise
        if not out.complete.rows:
            raise DataError("{path} has a header and no rows; add rows", path=self.table.where)

    def send(self) -> None:
        """Predicts this rank's windows for the first rank, which writes them."""
        for _ in self._pieces(self.group.share(int), lambda _: None):
            pass

    def _pieces(self, first_row: int, update: Callable[[int], object]) -> Iterator[Piece]:
        """The windows of all ranks in the file's order, each rank answering one a round."""
        mine = self._own_pieces(first_row, update)
        while any(pieces := self.group.gathered(next(mine, None))):
            yield from (piece for piece in pieces if piece is not None)

    def _own_pieces(self, first_row: int, update: Callable[[int], object]) -> Iterator[Piece]:
        """The windows of this rank, answered, from a row on."""
        on_cpu = self.classifier.on_cpu
        most_rows = self.group.share(lambda: CPU_WINDOW_ROWS if on_cpu else WINDOW_ROWS)
        rows = unbroken(self.table.read(self.table.columns), self.table.where)
        windows = _windows(islice(rows, first_row, None), most_rows)
        for window in islice(windows, self.group.number, None, self.group.count):
            answers = self._answers(window, update)
            empty_rows = sum(answer is None for answer in answers)
            yield Piece(self.form.lines(window, answers), len(window), empty_rows)

    def _answers(
        self, window: list[Row], update: Callable[[int], object]
    ) -> list[Prediction | None]:
        """An answer for each row; None for a row whose text, or one of its pair, is empty."""
        where = [self.table.columns.index(name) for name in self.texts]
        parts = [tuple(as_text(row[index], self.table.where) for index in where) for row in window]
        filled = [index for index, words in enumerate(parts) if all(map(str.strip, words))]
        texts: list[Any] = [
            parts[index] if len(where) == 2 else parts[index][0] for index in filled
        ]
        logits = self.classifier.logits(texts, batch_tokens=self.batch_tokens, update=update)
        found = self.classifier.predictions(logits)
        update(len(window) - len(filled))
        answers = dict(zip(filled, found, strict=True))
        return [answers.get(index) for index in range(len(window))]


def _windows(rows: Iterator[Row], most_rows: int) -> Iterator[list[Row]]:
    """The same windows on every rank, since only the rows decide."""
    window: list[Row] = []
    chars = 0
    for row in rows:
        window.append(row)
        chars += sum(len(cell) for cell in row if isinstance(cell, str))
        if len(window) == most_rows or chars > WINDOW_CHARS:
            yield window
            window, chars = [], 0
    if window:
        yield window


@contextmanager
def row_bar(total_rows: int | None) -> Iterator[Callable[[int], object]]:
    """A bar of rows; a command also says what all of them took."""
    bar = progress_bar("predicting", total_rows)
    try:
        yield bar.update
    finally:
        bar.close()
    if isinstance(bar, RowMeter):
        from memfit.run.announcements import voice

        voice(quiet=False)(bar.summary())


def _made_from(
    classifier: Classifier, table: Table, texts: list[str], source: Path
) -> dict[str, Any]:
    """What decides the rows of the output; device, batches and ranks only round differently."""
    try:
        about = source.stat()
        file = [str(source.resolve()), about.st_size, about.st_mtime_ns]
    except OSError:  # a dataset of the Hub
        file = [str(source)]
    options = {
        "columns": texts,
        "encoding": table.encoding,
        "header": table.has_header,
        "max_length": classifier.max_length,
        "labels": list(classifier.labels.names),
        "scoring": repr(classifier.scoring),
        "tokens": len(classifier.tokenizer),
    }
    return {
        "memfit": __version__, "file": file, "model": classifier.fingerprint(), "options": options,
    }  # fmt: skip


_DIFFERS = {
    "file": N_("{path} is of a file that has changed since; beginning again"),
    "model": N_("{path} is of another model; beginning again"),
    "options": N_("{path} was made with other options; beginning again"),
    "memfit": N_("{path} was made by another version of memfit; beginning again"),
}


def _say(sentence: str) -> None:
    """One line of a command; a call in Python returns what it did."""
    from memfit.run.announcements import voice

    voice(quiet=not is_told())(sentence)


def check_target(path: Path, source: Path) -> None:
    """Refuses an output that is a folder, the source itself, or of a kind that is not written."""
    if path.exists() and source.exists() and path.samefile(source):
        raise OutputError(
            "{path} is the file the texts come from; name another --output", path=path
        )
    if path.is_dir():
        raise OutputError("{path} is a folder; name a file with --output", path=path)
    if not path.parent.is_dir():
        raise OutputError(
            "there is no folder {folder} for {name}; make it first",
            folder=path.parent,
            name=path.name,
        )
    if path.suffix.lower() in NOT_WRITTEN:
        raise OutputError(
            "cannot write {ending} files; name the output .csv, .tsv or .jsonl", ending=path.suffix
        )


@dataclass(frozen=True, slots=True)
class _Form:
    """How rows are written: a table with a delimiter, or an object a line."""

    path: Path
    names: tuple[str, ...]

    @property
    def _is_json(self) -> bool:
        return self.path.suffix.lower() in JSON_LINES

    def head(self) -> bytes:
        """What the file begins with."""
        return b"" if self._is_json else self._table([self.names]).encode("utf-8-sig", "replace")

    def lines(self, rows: Sequence[Row], answers: Sequence[Prediction | None]) -> bytes:
        """The rows with label and score."""
        filled = [
            (*row, *(("", "") if answer is None else (answer.label, round(answer.score, 6))))
            for row, answer in zip(rows, answers, strict=True)
        ]
        if self._is_json:
            objects = (plain(dict(zip(self.names, row, strict=True))) for row in filled)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in objects)
        else:
            text = self._table(filled)
        # Half an emoji, as broken JSON carries, must not cost the file.
        return text.encode("utf-8", "replace")

    def _table(self, rows: Sequence[Row]) -> str:
        delimiter = "\t" if self.path.suffix.lower() in (".tsv", ".tab") else ","
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
        for row in rows:
            writer.writerow(
                json.dumps(cell, ensure_ascii=False) if isinstance(cell, list | dict) else cell
                for cell in row
            )
        return text.getvalue()
