"""One look on every terminal: 80 columns, pipes, dumb terminals, old encodings, Chinese."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from transformers import TrainerControl, TrainerState

from memfit.cli import run
from memfit.config import DataConfig, ModelConfig
from memfit.data import DataCounts, LabelSpace, LengthSummary
from memfit.errors import BudgetError, DataError, LossError, MemfitError, ModelError
from memfit.i18n import speaking
from memfit.memory.components import Component, MemoryPeak
from memfit.models import huggingface
from memfit.models.loading import check_model_folder
from memfit.records.evaluation import evaluate_predictions
from memfit.records.results import MemorySummary, RunSummary
from memfit.report import memory_bar, terminal
from memfit.report import terminal as announce
from memfit.run import announcements
from memfit.training.guard.adjusting import Adjustment, Adjustments, StepSettings
from memfit.training.progress import MemfitProgress, MemoryUse
from memfit.units import GIB, format_seconds, parse_budget

CONTROL = re.compile(r"\x1b\[[0-9;?]*([A-Za-z])")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
PEAK = MemoryPeak(
    {Component.WEIGHTS: GIB, Component.ACTIVATIONS: 2 * GIB}, 3 * GIB, 3 * GIB, 3 * GIB
)


def trained(console: Console, steps: int = 1000) -> None:
    """The first and the last steps of a long training of 2 s a step, with one adjustment."""
    seconds = tokens = 0
    use = MemoryUse(31 * GIB // 10, 37 * GIB // 10)
    progress = MemfitProgress(
        console=console,
        budget_bytes=4 * GIB,
        read_memory=lambda: use,
        clock=lambda: float(seconds),
    )
    args: Any = SimpleNamespace(device=torch.device("cpu"), metric_for_best_model="f1")
    state, control = TrainerState(max_steps=steps), TrainerControl()
    progress.read_tokens = lambda: tokens
    progress.on_train_begin(args, state, control)
    made = Adjustments(lambda: state.log_history, progress.say)
    for step in range(1, steps + 1):
        seconds, tokens = seconds + 2, tokens + 100_000
        state.global_step, state.epoch = step, step / 500
        progress.on_step_end(args, state, control)
        progress.on_log(args, state, control, logs={"loss": 0.5 + 1 / step})
        if step == 500:
            progress.on_evaluate(args, state, control, metrics={"eval_f1": 0.9312})
            made.note(
                Adjustment(
                    500, "[b]CUDA", str(StepSettings(4096)), str(StepSettings(2048, recomputed=12))
                )
            )
    progress.on_train_end(args, state, control)


def everything(console: Console) -> None:
    """All that a run prints but its plan."""
    counts = DataCounts(
        rows_read=8000, dropped_no_text=3, dropped_no_label=1, train_rows=7000,
        validation_rows=996, duplicates_across_split=4,
        train_class_counts={"負評": 2200, "正評": 4800}, text_column="review",
        label_column="label", encoding="gb18030",
    )  # fmt: skip
    lengths = LengthSummary(
        count=7765, mean=99.0, p50=70, p90=250, p99=510, max=2900,
        max_length=128, cut_rows=1708, histogram=(),
    )  # fmt: skip
    console.print(terminal.data_summary(counts, lengths, "single_label"))
    console.print(memory_bar.memory_bar(PEAK.components, 4 * GIB))
    console.print(memory_bar.memory_bar(PEAK.components, 2 * GIB))
    trained(console, 40)
    logits = torch.eye(2).numpy()[[1, 1, 0, 1, 0]]
    space = LabelSpace("single_label", ("負評", "正評"))
    answers = torch.tensor([1, 1, 1, 0, 0]).numpy()
    console.print(terminal.metrics_table(evaluate_predictions(logits, answers, space)))
    console.print(terminal.training_result(told(), Path("run")))


def told() -> RunSummary:
    return RunSummary(
        model="m",
        task="single_label",
        status="finished",
        metrics={"f1": 0.93, "accuracy": 0.9},
        averaging="binary",
        positive="正評",
        training={"steps": 1438, "epochs": 2.0},
        seconds={"train": 3661.0},
        memory=MemorySummary(4 * GIB, PEAK, PEAK),
    )


def shown(*, spoken: str, live: bool = False, width: int = 80, **settings: Any) -> str:
    out = io.StringIO()
    with speaking(spoken):
        everything(Console(file=out, width=width, force_terminal=live, **settings))
    return out.getvalue()


# ---- 80 columns ----


@pytest.mark.parametrize("spoken", ["en", "zh"])
@pytest.mark.parametrize("width", [80, 40])
def test_no_line_is_wider_than_the_terminal(spoken: str, width: int) -> None:
    text = CONTROL.sub("", shown(spoken=spoken, live=True, width=width))
    assert max(cell_len(line) for line in re.split(r"[\r\n]", text)) <= width


def test_all_a_person_waits_for_fits_80_columns_in_two_lines() -> None:
    out = io.StringIO()
    trained(Console(file=out, width=80, force_terminal=True))
    screen = CONTROL.sub("", out.getvalue())
    *_, bar = (line for line in re.split(r"[\r\n]", screen) if line.startswith("training ━"))
    assert cell_len(bar.rstrip()) == 80
    assert bar.endswith("━ 1000/1000 50,000 tokens/s")
    assert re.search(r"50,000 tokens/s  \d+ min \d\d s left", screen)
    best = "loss 0.5010  f1 0.9312  memory 3.10 GiB (peak 3.70 GiB of 4.00 GiB)"
    assert best in screen
    assert len(best) <= 80


def test_progress_in_chinese() -> None:
    out = io.StringIO()
    with speaking("zh"):
        trained(Console(file=out, width=80, force_terminal=False))
    lines = out.getvalue().splitlines()
    assert lines[0] == "训练：1000 步"
    assert "第 1.00 轮：f1 0.9312" in lines
    said = "第 500 步：[b]CUDA：一次 4,096 个词元 -> 一次 2,048 个词元，12 层重计算"
    assert said in lines
    last = next(line for line in lines if line.startswith("第 950/1000 步"))
    assert "占用 3.10 GiB（峰值 3.70 GiB，预算 4.00 GiB）" in last
    assert last.endswith("  50,000 词元/秒  剩余 1 分 40 秒")


# ---- where there is no screen ----


def test_in_a_pipe_there_are_a_few_plain_lines() -> None:
    out = io.StringIO()
    trained(Console(file=out, width=200))
    assert not CONTROL.search(out.getvalue())
    assert "\r" not in out.getvalue()
    lines = out.getvalue().splitlines()
    assert 20 <= len(lines) <= 26
    assert sum(line.startswith("step ") and "left" in line for line in lines) == 19
    assert "50,000 tokens/s" in lines[-1]


def test_a_dumb_terminal_gets_lines_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    trained(Console(file=out, width=200, force_terminal=True))
    assert not CONTROL.search(out.getvalue())
    assert sum(line.startswith("step ") for line in out.getvalue().splitlines()) == 20 + 1


def test_colours_forced_into_a_log_do_not_bring_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    trained(announcements.plain_console())
    err = capsys.readouterr().err
    assert set(CONTROL.findall(err)) <= {"m"}
    assert sum(line.startswith("step ") for line in err.splitlines()) == 20 + 1


@pytest.mark.parametrize("spoken", ["en", "zh"])
def test_without_colours_nothing_is_coloured(spoken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert COLOUR.search(shown(spoken=spoken, live=True))
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(spoken=spoken, live=True)
    assert not COLOUR.search(text)
    assert "━" in text  # the bar itself stays


def test_a_quiet_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    announcements.voice(quiet=True)("a line")
    assert capsys.readouterr().err == ""
    announcements.voice(quiet=False)("a \x1b[2Jline")
    assert capsys.readouterr().err == "a  [2Jline\n"


# ---- consoles that lack characters ----


@pytest.mark.parametrize("spoken", ["en", "zh"])
@pytest.mark.parametrize("encoding", ["cp936", "cp1252", "cp437", "ascii", "utf-8"])
def test_no_encoding_ends_a_run(
    spoken: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "80")
    with speaking(spoken):
        everything(terminal.console())
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert ("正評" in text) == (encoding in ("cp936", "utf-8"))
    assert "\\u" not in text
    assert ("█" in text) == (encoding == "utf-8")
    if spoken == "en" and encoding == "cp1252":
        assert "true v predicted >" in text
    if spoken == "zh" and encoding == "cp936":
        assert "真实 ↓ 预测 →" in text
        assert "?" not in text
    assert ("WWWW" in text) == (encoding != "utf-8")


def test_what_an_old_console_lacks_is_replaced_one_for_one() -> None:
    assert "a → b … 正評 █".encode("cp1252", "memfit").decode("cp1252") == "a > b … ?? #"
    assert "\ud800".encode("utf-8", "memfit") == b"?"


# ---- Chinese ----


def test_names_and_values_stand_in_columns_in_both_languages() -> None:
    for spoken, cells in (("en", 9), ("zh", 6)):
        with speaking(spoken):
            lines = [
                announce.fact_line(name, "|") for name in ("model", "budget", "plan", "memory")
            ]
        assert {cell_len(line) - 1 for line in lines} == {cells}
    out = io.StringIO()
    with speaking("zh"):
        console = Console(file=out, width=80)
        console.print(terminal.training_result(told()))
        path = terminal.fact("model", "/a/b")
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    starts = {cell_len(line[: re.match(r"\S+\s+", line).end()]) for line in lines}  # type: ignore[union-attr]
    assert starts == {cell_len(path.removesuffix("/a/b"))} == {6}
    assert "已完成，1,438 步，2 轮，1 小时 01 分" in out.getvalue()


def test_tables_of_wide_characters_are_aligned() -> None:
    lines = shown(spoken="zh").splitlines()
    begin = lines.index(next(line for line in lines if line.startswith("类别  精确率  召回率")))
    assert len({cell_len(line.rstrip()) for line in lines[begin : begin + 3]}) == 1
    assert [line.split()[0] for line in lines[begin : begin + 3]] == ["类别", "負評", "正評"]


def test_times_are_written_in_the_language_spoken_or_another() -> None:
    with speaking("zh"):
        assert [format_seconds(one) for one in (0.42, 12, 200, 7500)] == [
            "0.4 秒", "12 秒", "3 分 20 秒", "2 小时 05 分",
        ]  # fmt: skip
        assert format_seconds(200, "en") == "3 min 20 s"


def in_chinese(work: Any) -> str:
    with speaking("zh"):
        with pytest.raises(MemfitError) as caught:
            work()
        text = str(caught.value)
    assert CHINESE.search(text)
    return text


def test_the_errors_people_meet_are_said_in_chinese(tmp_path: Path) -> None:
    from memfit.data import read_table

    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n")
    (tmp_path / "reviews.csv").write_text("text,label\nx,1\n")
    missing = str(tmp_path / "review.csv")
    assert in_chinese(lambda: read_table(DataConfig(path=missing))) == (
        f"没有文件 {missing}；请检查路径。你是不是要写 'reviews.csv'？"
    )
    assert "是空的" in in_chinese(lambda: read_table(DataConfig(path=str(tmp_path / "empty.csv"))))
    assert "找不到标签列，表中有这些列：a, b；请用 --label-column 指明" in in_chinese(
        lambda: read_table(DataConfig(path=str(tmp_path / "odd.csv")))
    )
    assert "看不懂预算 '4 chips'" in in_chinese(lambda: parse_budget("4 chips"))
    folder = ModelConfig(model=str(tmp_path))
    assert "没有 config.json" in in_chinese(lambda: check_model_folder(folder))
    with speaking("zh"):
        assert str(LossError("损失是 nan")) == "损失是 nan；还没有写过检查点"
    for kind in (BudgetError, DataError, ModelError):
        assert kind.exit_code == 2


def test_the_command_line_fails_in_chinese(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["train", "--lang", "zh", "x.csv", "--model", str(tmp_path), "--budget", "viel"])
    assert (code, capsys.readouterr().err) == (
        2,
        "memfit: 看不懂预算 'viel'；请写大小（4GB、4GiB）、比例（80%）或 auto\n",
    )
    assert run(["--lang", "zh", "train", "x.csv", "--model", "m", "--tsak", "auto"]) == 2


def test_a_hub_that_is_off_says_so_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "is_off", lambda: True)
    with speaking("zh"):
        assert huggingface.why_silent() == "已关闭（HF_HUB_OFFLINE=1）"
