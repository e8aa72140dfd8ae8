"""A folder of class folders: each text is a file, and its label the folder it lies in.

    reviews/good/1.txt        reviews/train/good/1.txt
    reviews/bad/2.txt         reviews/validation/bad/2.txt

Beside `train`, a folder called validation, valid, val or dev validates; others are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from memfit.data.encodings import read_text
from memfit.data.tables import Row, Table

_VALIDATION = ("validation", "valid", "val", "dev")

_ENDING = ".txt"


def open_class_folders(path: Path, encoding: str | None) -> tuple[Table, Table | None] | None:
    """(training table, its own validation table or None); None for a folder of other things."""
    train = path / "train"
    if train.is_dir() and _classes(train):
        found = (path / name for name in _VALIDATION)
        validation = next((one for one in found if one.is_dir() and _classes(one)), None)
        return _table(train, encoding), None if validation is None else _table(validation, encoding)
    return (_table(path, encoding), None) if _classes(path) else None


def _classes(folder: Path) -> list[Path]:
    """The folders in it that hold texts, by name."""
    folders = sorted(one for one in folder.iterdir() if one.is_dir() and one.name[0] != ".")
    return [one for one in folders if next(_texts(one), None) is not None]


def _texts(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.suffix.lower() == _ENDING)


def _table(folder: Path, encoding: str | None) -> Table:
    def read(wanted: Sequence[str]) -> Iterator[Row]:
        for label in _classes(folder):
            for file in sorted(_texts(label)):
                cells = {"file": f"{label.name}/{file.name}", "label": label.name}
                if "text" in wanted:
                    cells["text"] = read_text(file, encoding)
                yield tuple(cells[name] for name in wanted)

    return Table(str(folder), ("text", "label", "file"), read)
