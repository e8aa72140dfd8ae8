"""What the commands print: widths, colours, and data that must not act on the terminal."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from memfit.data import DataCounts, LabelSpace, LengthSummary
from memfit.i18n import speaking
from memfit.memory.components import Component, MemoryPeak
from memfit.records.evaluation import Evaluation, evaluate_predictions
from memfit.records.results import MemorySummary, RunSummary
from memfit.report import memory_bar, terminal
from memfit.units import GIB, MIB, percent

COMPONENTS = {
    Component.WEIGHTS: 2 * GIB,
    Component.GRADIENTS: 0,
    Component.ACTIVATIONS: 1 * GIB,
    Component.CONTEXT: 512 * MIB,
}


def printed(what: RenderableType, width: int = 80, *, colour: bool = False) -> list[str]:
    out = io.StringIO()
    Console(
        file=out, width=width, force_terminal=colour, markup=False, emoji=False, highlight=False
    ).print(what)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_memory_bar_fills_in_proportion() -> None:
    headline, bar, *legend = printed(memory_bar.memory_bar(COMPONENTS, 7 * GIB), width=71)
    assert headline == "Memory  3.50 GiB of 7.52 GB (7.00 GiB), 50 %"
    assert {glyph: bar.count(glyph) for glyph in "█░▞·│"} == {
        "█": 20,
        "░": 10,
        "▞": 5,
        "·": 35,
        "│": 1,
    }
    assert legend == ["█ weights 2.00 GiB   ░ activations 1.00 GiB   ▞ context 512.0 MiB"]


def test_a_bar_beyond_the_budget_marks_where_the_budget_ends() -> None:
    headline, bar, *_ = printed(memory_bar.memory_bar(COMPONENTS, 7 * GIB // 4), width=71)
    assert headline.endswith("(1.75 GiB), 1.75 GiB too much")
    assert bar.index("┃") == 35
    assert len(bar) == 71


def test_a_bar_without_budget_is_full() -> None:
    headline, bar, *_ = printed(memory_bar.memory_bar(COMPONENTS, title="Peak"), width=71)
    assert headline == "Peak  3.50 GiB"
    assert "·" not in bar
    assert bar.count("█") == 40


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    shown: list[RenderableType] = [
        memory_bar.memory_bar(COMPONENTS, 4 * GIB),
        terminal.metrics_table(binary()),
        terminal.training_result(summary(), Path("runs") / ("long" * 30)),
    ]
    for item in shown:
        assert max(cell_len(line) for line in printed(item, width)) <= width


def test_a_console_without_unicode_gets_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    console = terminal.console()
    console.print(memory_bar.memory_bar(COMPONENTS, 4 * GIB))
    console.print("正評")
    stream.flush()
    lines = raw.getvalue().decode("ascii").splitlines()
    assert lines[1].startswith("WWWW")
    assert lines[1].endswith("|")
    assert lines[-1] == "??"


def test_no_color_and_pipes_have_no_escape_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    terminal.console().print(memory_bar.memory_bar(COMPONENTS, 4 * GIB))
    piped = capsys.readouterr().out
    assert "\x1b" not in piped
    assert max(cell_len(line) for line in piped.splitlines()) <= 80
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal.console(stderr=True).print(memory_bar.memory_bar(COMPONENTS, 4 * GIB))
    assert "\x1b[34m" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.console(stderr=True).print(memory_bar.memory_bar(COMPONENTS, 4 * GIB))
    assert "\x1b[34m" not in capsys.readouterr().err


def test_data_is_not_read_as_markup_nor_acts_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = "[bold red]:smile: \x1b[2J\x07\u202ecod\r\n\x9b"
    space = LabelSpace("single_label", (bad, "[/]"))
    result = evaluate_predictions(np.eye(2), np.array([0, 1]), space)
    console = terminal.console()
    console.print(terminal.metrics_table(result))
    console.print(terminal.data_summary(counts(train_class_counts={bad: 1, "[/]": 2})))
    out = capsys.readouterr().out
    assert "[bold red]:smile:" in out
    assert "[/]" in out
    assert not {"\x1b", "\x07", "\u202e", "\r", "\x9b"} & set(out)


def test_shortened_text_counts_chinese_as_two_cells() -> None:
    assert terminal.shorten("服務人員都很親切", 16) == "服務人員都很親切"
    short = terminal.shorten("服務人員都很親切", 11)
    assert short == "服務人員都…"
    assert terminal.shorten("a\n\n b\tc", 10) == "a b c"


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.004, "0.4 %"), (0.17, "17 %"), (0.996, "99.6 %"), (1.0, "100 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def binary() -> Evaluation:
    logits = np.eye(2)[[1, 1, 0, 1, 0]]
    space = LabelSpace("single_label", ("負評", "正評"))
    return evaluate_predictions(logits, np.array([1, 1, 1, 0, 0]), space)


def test_metrics_say_which_f1_it_is_and_show_each_class() -> None:
    lines = printed(terminal.metrics_table(binary()))
    assert lines[0] == "F1 0.6667 (正評)   accuracy 0.6000   precision 0.6667   recall 0.6667"
    assert lines[1] == "on 5 rows"
    assert " ".join(lines[2:4]).startswith("F1, precision and recall are those of 正評;")
    assert [line.split() for line in lines[6:8]] == [
        ["負評", "0.5000", "0.5000", "0.5000", "2"],
        ["正評", "0.6667", "0.6667", "0.6667", "3"],
    ]
    assert [line.split() for line in lines[-2:]] == [["負評", "1", "1"], ["正評", "1", "2"]]


def test_other_tasks_show_their_own_metrics() -> None:
    macro = evaluate_predictions(
        np.eye(12), np.arange(12), LabelSpace("single_label", tuple("abcdefghijkl"))
    )
    lines = printed(terminal.metrics_table(macro))
    assert "F1 1.0000 (macro)" in lines[0]
    assert not any("predicted" in line for line in lines)  # 12 x 12 does not fit a screen
    value = evaluate_predictions(
        np.array([1.0, 2.0]), np.array([1.0, 4.0]), LabelSpace("regression", ("score",))
    )
    assert printed(terminal.metrics_table(value))[0].startswith("MSE 2   MAE 1.0000   R² ")


def counts(**changes: object) -> DataCounts:
    values: dict[str, object] = {
        "rows_read": 7766,
        "dropped_no_text": 0,
        "dropped_no_label": 0,
        "train_rows": 6988,
        "validation_rows": 777,
        "duplicates_across_split": 0,
        "train_class_counts": {"負評": 2200, "正評": 4788},
    }
    return DataCounts(**{**values, **changes})  # type: ignore[arg-type]


def lengths(cut_rows: int) -> LengthSummary:
    return LengthSummary(
        count=7765, mean=99.0, p50=70, p90=250, p99=510, max=2900,
        max_length=128, cut_rows=cut_rows, histogram=(),
    )  # fmt: skip


def test_the_data_summary_accounts_for_every_row() -> None:
    shown = " ".join(" ".join(printed(terminal.data_summary(counts()), 200)).split())
    assert shown == (
        "rows 6,988 to train on, 777 to validate classes 2,200 31 % 負評 4,788 69 % 正評"
    )
    full = counts(dropped_no_text=1, dropped_no_label=3)
    shown = " ".join(printed(terminal.data_summary(full, lengths(1708)), 200))
    assert "left out 1 without text and 3 without label" in shown
    assert "longest 2,900; max_length 128 cuts 1,708 rows (22 %)" in shown
    assert "cuts none" in " ".join(printed(terminal.data_summary(full, lengths(0)), 200))


def test_the_data_summary_says_what_was_found_in_the_table() -> None:
    found = counts(
        text_column="review",
        label_column="tags",
        encoding="gb18030",
        train_rows=10,
        train_class_counts={"服務": 5, "早餐": 10},
    )
    lines = [
        " ".join(line.split())
        for line in printed(terminal.data_summary(found, None, "multi_label"))
    ]
    assert lines[0] == "columns text review, label tags; multi-label; gb18030"
    assert lines[2:] == ["classes 5 50 % 服務", "10 100 % 早餐"]  # of the rows, not of the labels


def test_many_classes_are_not_all_listed() -> None:
    many = counts(train_class_counts={f"c{number}": 1 for number in range(50)})
    lines = printed(terminal.data_summary(many))
    assert lines[-1].split() == ["and", "30", "more"]


def summary() -> RunSummary:
    peak = MemoryPeak(COMPONENTS, 3 * GIB, 3 * GIB, 7 * GIB // 2)
    return RunSummary(
        model="hfl/rbt3",
        task="single_label",
        metrics={"f1": 0.93},
        averaging="binary",
        positive="正評",
        training={"steps": 1438, "epochs": 2.0},
        seconds={"train": 61.4},
        memory=MemorySummary(budget_bytes=4 * GIB, predicted=peak),
    )


def test_a_measurement_of_one_step_says_which() -> None:
    peak = MemoryPeak(COMPONENTS, 3 * GIB, 3 * GIB, 3 * GIB)
    told = replace(summary(), memory=MemorySummary(measured=peak, measured_step=3))
    assert "3.00 GiB at the peak of step 3" in " ".join(printed(terminal.training_result(told)))


def test_epochs_have_two_digits() -> None:
    told = replace(summary(), training={"steps": 20, "epochs": 0.689655})
    assert "20 steps, 0.69 epochs" in " ".join(printed(terminal.training_result(told)))


def test_only_a_gpu_has_gpu_memory_in_chinese() -> None:
    with speaking("zh"):
        assert terminal.fact_line("memory", "").startswith("内存")
        assert terminal.fact_line("gpu_memory", "").startswith("显存")


def test_a_training_result_says_how_it_ended_and_where_it_lies() -> None:
    lines = printed(terminal.training_result(summary(), Path("run")))
    assert [" ".join(line.split()) for line in lines] == [
        "result F1 0.9300 (正評)",
        "training finished, 1,438 steps, 2 epochs, 1 min 01 s",
        "predicted 3.50 GiB at the peak, 88 % of the budget",
        "model run",
        f"report {Path('run') / 'report.html'}",
    ]
