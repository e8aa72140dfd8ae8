"""Small tables for the data tests."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from memfit.config import DataConfig

GOOD = ["房间很大，床也舒服", "服務人員都很親切", "早餐好吃，下次再来", "位置方便，价格不贵"]
BAD = ["房间很脏，再也不来", "服務人員都不親切", "早餐难吃，空调太吵", "位置偏僻，价格很贵"]


def reviews(copies: int = 5) -> list[tuple[Any, str]]:
    """(label, text) rows, all texts different, half of them good."""
    rows = []
    for copy in range(copies):
        rows += [(1, f"{text}{copy}") for text in GOOD] + [(0, f"{text}{copy}") for text in BAD]
    return rows


def write_csv(
    path: Path,
    rows: Iterable[Sequence[Any]],
    header: Sequence[str] = ("label", "review"),
    encoding: str = "utf-8",
    delimiter: str = ",",
) -> Path:
    """As the csv module and Excel write it."""
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One object a line."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_xlsx(path: Path, rows: Iterable[Sequence[Any]]) -> Path:
    """A workbook as Excel writes it, with an empty sheet before the one that holds the rows."""
    sheets = [_sheet([]), _sheet(rows)]
    kinds = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    listed = "".join(
        f'<sheet name="Sheet{n}" sheetId="{n}" r:id="rId{n}"/>' for n in range(1, len(sheets) + 1)
    )
    related = "".join(
        f'<Relationship Id="rId{n}" Type="{kinds}/worksheet" Target="worksheets/sheet{n}.xml"/>'
        for n in range(1, len(sheets) + 1)
    )
    parts = {
        "_rels/.rels": f'<Relationships xmlns="{package}"><Relationship Id="rId1" '
        f'Type="{kinds}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{kinds}"><sheets>{listed}</sheets>'
        "</workbook>",
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}">{related}</Relationships>',
    }
    parts |= {
        f"xl/worksheets/sheet{n}.xml": f'<worksheet xmlns="{main}">{sheet}</worksheet>'
        for n, sheet in enumerate(sheets, 1)
    }
    with zipfile.ZipFile(path, "w") as file:
        for name, text in parts.items():
            file.writestr(name, f'<?xml version="1.0" encoding="UTF-8"?>{text}')
    return path


def _sheet(rows: Iterable[Sequence[Any]]) -> str:
    lines = []
    for number, row in enumerate(rows, 1):
        cells = [
            f'<c r="{letter}{number}"><v>{cell}</v></c>'
            if isinstance(cell, int | float)
            else f'<c r="{letter}{number}" t="inlineStr"><is><t>{escape(cell)}</t></is></c>'
            for letter, cell in zip("ABCDEF", row, strict=False)
            if cell is not None
        ]
        lines.append(f'<row r="{number}">{"".join(cells)}</row>')
    return f"<sheetData>{''.join(lines)}</sheetData>"


def config(path: Path | str, **options: Any) -> DataConfig:
    """The defaults of a run, for one file."""
    return DataConfig(path=str(path), **options)
