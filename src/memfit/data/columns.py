"""Which columns hold the text, its pair and the label: found by name, or named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from memfit.data.tables import Table
from memfit.errors import DataError, nearest
from memfit.i18n import N_, t

if TYPE_CHECKING:
    from memfit.config import DataConfig

# In order of preference: a table with a title and a body is classified by its body.
_TEXT_NAMES = """
    text texts sentence sentences review reviews content contents comment comments body
    review_text review_body review_content comment_text text_content full_text
    message tweet post document passage utterance query question description abstract
    summary title headline
    文本 评论 評論 评价 評價 内容 內容 正文 句子 评论内容 評論內容 留言 文字 问题 問題 摘要
    标题 標題
"""

_LABEL_NAMES = """
    label labels sentiment class classes category categories target targets polarity emotion
    intent topic tag tags y score scores rating ratings stars
    标签 標籤 类别 類別 分类 分類 情感 情绪 情緒 评分 評分 分数 分數 星级 星級
"""

_PAIRS = (
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("text1", "text2"), ("text", "text_pair"), ("text_a", "text_b"), ("sentence_a", "sentence_b"),
)  # fmt: skip


_SAMPLED_ROWS = 1000


def named_columns(first_line: Sequence[str]) -> tuple[str, ...]:
    """The columns as the first line names them."""
    return tuple(name.strip() or f"column_{n}" for n, name in enumerate(first_line, 1))


def numbered_columns(count: int) -> tuple[str, ...]:
    """The columns of a table whose first line is a row."""
    return tuple(str(number) for number in range(1, count + 1))


def begins_with_a_row(first_line: Sequence[str], below: Iterable[Sequence[str]]) -> bool:
    """Whether the first line is no header: nothing in it is a usual name, and a cell comes again.

    Files such as THUCNews (label, tab, text) begin so: their first label is that of many rows.
    """
    if has_usual_name(first_line):
        return False
    cells = [cell.strip() for cell in first_line]
    return any(
        cell and cell == other.strip()
        for row in below
        for cell, other in zip(cells, row, strict=False)
    )


def has_usual_name(cells: Sequence[str]) -> bool:
    """Whether one of the cells is what people call a column of texts or labels."""
    usual = {
        *_TEXT_NAMES.split(),
        *_LABEL_NAMES.split(),
        *(name for pair in _PAIRS for name in pair),
    }
    return any(_plain(cell.strip()) in usual for cell in cells)


@dataclass(frozen=True, slots=True)
class Columns:
    """The chosen columns; several labels are 0/1 columns of a multi-label table."""

    text: str
    text_pair: str | None
    labels: tuple[str, ...]
    group: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The text column, and its pair where there is one."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def all(self) -> tuple[str, ...]:
        """In the order they are read."""
        return (*self.texts, *self.labels, *(() if self.group is None else (self.group,)))


def choose_columns(table: Table, config: DataConfig) -> Columns:
    """The columns the config names, and the rest by their usual names."""
    texts = (config.text_column, config.text_pair_column)
    labels = _labels(table, config.label_column, texts)
    text, pair = choose_texts(table, config.text_column, config.text_pair_column, taken=labels)
    for one, kind in (
        (
            text,
            N_(
                "{where}: {column} is both the text and the label column; name another with "
                "--text-column or --label-column"
            ),
        ),
        (
            pair,
            N_(
                "{where}: {column} is both the text pair and the label column; name another with "
                "--text-column or --label-column"
            ),
        ),
    ):
        if one in labels:
            raise DataError(kind, where=table.where, column=repr(one))
    group = config.group_column and _named(table, config.group_column, "--group-column")
    if group is not None and group in (text, pair, *labels):
        raise DataError(
            "{where}: {column} is the text or the label already; name another --group-column",
            where=table.where,
            column=repr(group),
        )
    columns = Columns(text, pair, labels, group)
    for column in columns.all:
        _check_unique(table, column)
    return columns


def choose_texts(
    table: Table, text: str | None, pair: str | None, taken: Iterable[str] = ()
) -> tuple[str, str | None]:
    """The text column and its pair or None; both named, or found among what is not taken."""
    if text is not None:
        text = _named(table, text, "--text-column")
    if pair is not None:
        pair = _named(table, pair, "--text-pair-column")
    free = [column for column in table.columns if column not in taken and column != pair]
    if text is None and pair is None:
        by_name = {_plain(column): column for column in free}
        known = ((by_name.get(first), by_name.get(second)) for first, second in _PAIRS)
        text, pair = next((pair for pair in known if None not in pair), (None, None))
    if text is None:
        text = _first(free, _TEXT_NAMES)
        if table.numbered and free:  # of several unnamed columns, that of the longest texts
            rows = _sample(table, free)
            sizes = [sum(len(str(row[place])) for row in rows) for place in range(len(free))]
            text = free[sizes.index(max(sizes))]
    if text is None:
        raise _no_column(
            table,
            N_("{where}: no text column among {columns}; name it with --text-column"),
            N_(
                "{where}: no text column among {columns}; name it with --text-column, or "
                "say --no-header if the first line is a row"
            ),
        )
    if text == pair:
        raise DataError(
            "{where}: --text-column and --text-pair-column are both {name}; name two "
            "different columns",
            where=table.where,
            name=repr(text),
        )
    return text, pair


def require_columns(table: Table, columns: Columns, of: str) -> None:
    """A validation file must have the columns of the training file."""
    for column in columns.all:
        if column not in table.columns:
            said = {"where": table.where, "name": repr(column), "columns": _listed(table)}
            raise DataError(
                "{where}: no column {name}, which {of} has, among {columns}; give both the "
                "same header",
                of=of,
                **said,
            )
        _check_unique(table, column)


def _labels(
    table: Table, named: str | None, texts: tuple[str | None, str | None]
) -> tuple[str, ...]:
    if named is None and len(table.columns) == 1 and table.where.lower().endswith(".txt"):
        raise DataError(
            "{where}: there is one column and no label; write a label, a tab and a text in "
            "each line",
            where=table.where,
        )
    if named is None and table.numbered:
        return (_fewest(table, [column for column in table.columns if column not in texts]),)
    if named is None:
        found = _first(table.columns, _LABEL_NAMES)
        if found is None:
            raise _no_column(
                table,
                N_("{where}: no label column among {columns}; name it with --label-column"),
                N_(
                    "{where}: no label column among {columns}; name it with "
                    "--label-column, or say --no-header if the first line is a row"
                ),
            )
        return (found,)
    if named in table.columns or "," not in named:
        return (_named(table, named, "--label-column"),)
    several = [part.strip() for part in named.split(",") if part.strip()]
    labels = tuple(dict.fromkeys(_named(table, part, "--label-column") for part in several))
    if not labels:
        raise DataError(
            "--label-column {name} names no column; write one name, or a,b,c", name=repr(named)
        )
    return labels


def _named(table: Table, name: str, option: str) -> str:
    """The column as the table spells it; the exact spelling first, then without regard to case."""
    exact = [column for column in table.columns if column == name]
    close = exact or [column for column in table.columns if _plain(column) == _plain(name)]
    if not close:
        said = {"where": table.where, "name": repr(name), "columns": _listed(table)}
        hint = nearest(name, table.columns)
        raise DataError(
            "{where}: no column {name} ({option}) among {columns}; name one of these.{hint}",
            option=option,
            hint=hint,
            **said,
        )
    return close[0]


def _fewest(table: Table, free: list[str]) -> str:
    """Of two unnamed columns, the one whose values repeat; of more columns none is guessed."""
    if len(free) == 1:
        return free[0]
    if len(free) == 2:
        rows = _sample(table, free)
        counts = [len({row[place] for row in rows}) for place in range(2)]
        if 2 * min(counts) <= len(rows) and counts[0] != counts[1]:
            return free[counts.index(min(counts))]
    row = next(iter(_sample(table, free)), ())
    shown = [f"{name} ({str(cell)[:12]})" for name, cell in zip(free, row, strict=False)]
    raise DataError(
        "{where}: its columns have no names, and which holds the labels cannot be told among "
        "{columns}; write such as --label-column 1 --text-column 2",
        where=table.where,
        columns=", ".join(shown),
    )


def _sample(table: Table, columns: list[str]) -> list[tuple[Any, ...]]:
    return list(islice(table.read(columns), _SAMPLED_ROWS))


def _first(columns: Sequence[str], known: str) -> str | None:
    by_name = {_plain(column): column for column in reversed(columns)}
    return next((by_name[name] for name in known.split() if name in by_name), None)


def _check_unique(table: Table, column: str) -> None:
    if table.columns.count(column) > 1:
        said = {"where": table.where, "count": table.columns.count(column), "name": repr(column)}
        raise DataError("{where}: {count} columns are called {name}; rename all but one", **said)


def _no_column(table: Table, usual: str, headless: str) -> DataError:
    """`headless` is the sentence for a file that begins with its first row."""
    row_like = (
        len(table.columns) == 1
        or table.where.lower().endswith(".txt")
        or any(len(name) > 40 or name.isdecimal() for name in table.columns)
    )
    sentence = headless if row_like and table.has_header else usual
    return DataError(sentence, where=table.where, columns=_listed(table))


def _plain(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _listed(table: Table) -> str:
    shown = [column if len(column) <= 40 else column[:39] + "…" for column in table.columns[:20]]
    more = len(table.columns) - 20
    kind = N_("the columns {names} and {more} more") if more > 0 else N_("the columns {names}")
    return t(kind, names=", ".join(shown), more=more)
