"""Columns are found by their usual names, taken by the names given, and otherwise listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from data_fixtures import config

from memfit.data.columns import Columns, choose_columns, choose_texts, require_columns
from memfit.data.tables import Row, Table
from memfit.errors import DataError


def nothing(_: Sequence[str]) -> Iterator[Row]:
    return iter(())


def table(*columns: str) -> Table:
    return Table("reviews.csv", columns, nothing, has_header=True)


def choose(*columns: str, **options: Any) -> Columns:
    return choose_columns(table(*columns), config("reviews.csv", **options))


@pytest.mark.parametrize(
    ("columns", "text", "label"),
    [
        (("label", "review"), "review", "label"),
        (("id", "TEXT", "Sentiment"), "TEXT", "Sentiment"),
        (("title", "content", "category"), "content", "category"),
        (("title", "stars"), "title", "stars"),
        (("Review Text", "class"), "Review Text", "class"),
        (("评论", "标签"), "评论", "标签"),
        (("標題", "內容", "類別"), "內容", "類別"),
        (("情感", "正文"), "正文", "情感"),
        (("sentence", "labels", "score"), "sentence", "labels"),
        ((" comment-text ", "rating"), " comment-text ", "rating"),
    ],
)
def test_columns_are_found_by_their_usual_names(
    columns: tuple[str, ...], text: str, label: str
) -> None:
    assert choose(*columns) == Columns(text, None, (label,))


@pytest.mark.parametrize(
    ("first", "second"),
    [("sentence1", "sentence2"), ("premise", "hypothesis"), ("Question1", "Question2")],
)
def test_well_known_pairs_are_found(first: str, second: str) -> None:
    found = choose(second, first, "label")
    assert found == Columns(first, second, ("label",))
    assert found.all == (first, second, "label")


def test_a_named_first_text_is_not_made_a_pair() -> None:
    assert choose("premise", "hypothesis", "label", text_column="premise").text_pair is None


def test_a_named_pair_column_is_not_taken_for_the_text() -> None:
    found = choose("text", "review", "label", text_pair_column="text")
    assert (found.text, found.text_pair) == ("review", "text")


def test_named_columns_win_and_case_does_not_matter() -> None:
    found = choose("text", "Body", "label", "Stars", text_column="body", label_column="stars")
    assert found == Columns("Body", None, ("Stars",))


def test_several_label_columns_are_kept_in_the_order_given() -> None:
    found = choose("text", "toxic", "rude", label_column="rude, toxic")
    assert found.labels == ("rude", "toxic")


def test_a_column_whose_name_has_a_comma_is_one_column() -> None:
    assert choose("text", "a,b", label_column="a,b").labels == ("a,b",)


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        (
            ("a", "label"),
            {},
            "no text column among the columns a, label; name it with --text-column",
        ),
        (
            ("1", "房间很大"),
            {},
            "name it with --label-column, or say --no-header if the first line",
        ),
        (
            ("text", "b"),
            {},
            "no label column among the columns text, b; name it with --label-column",
        ),
        (
            ("reviews", "label"),
            {"text_column": "reviws"},
            r"no column 'reviws' \(--text-column\) among the columns reviews, label; "
            r"name one of these. Did you mean 'reviews'\?",
        ),
        (("text", "label"), {"label_column": "lable"}, r"Did you mean 'label'\?"),
        (("text", "label"), {"label_column": " , "}, "names no column"),
        (
            ("text", "label"),
            {"text_column": "label"},
            "'label' is both the text and the label column",
        ),
        (
            ("text", "label"),
            {"text_pair_column": "label"},
            "'label' is both the text pair and the label column",
        ),
        (
            ("text", "label"),
            {"text_column": "text", "text_pair_column": "TEXT"},
            "are both 'text'",
        ),
        (("text", "label", "text"), {}, "2 columns are called 'text'; rename all but one"),
    ],
)
def test_a_choice_that_cannot_be_made_is_explained(
    columns: tuple[str, ...], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        choose(*columns, **options)
    assert "reviews.csv" in str(caught.value) or "--label-column" in str(caught.value)


def test_a_wide_table_lists_twenty_columns_and_counts_the_rest() -> None:
    with pytest.raises(DataError, match=r"c0, c1, .* c19 and 5 more; name it"):
        choose(*(f"c{number}" for number in range(25)))


def test_a_header_that_is_really_a_text_is_cut_in_the_message() -> None:
    with pytest.raises(DataError, match=r"早{39}…"):
        choose("早" * 500)


def test_texts_alone_are_found_without_a_label() -> None:
    assert choose_texts(table("id", "content"), None, None) == ("content", None)


def test_a_validation_table_must_have_the_same_columns() -> None:
    columns = Columns("review", None, ("label",))
    with pytest.raises(DataError, match=r"^val.csv: no column 'review', which train.csv has"):
        require_columns(Table("val.csv", ("text", "label"), nothing), columns, "train.csv")
