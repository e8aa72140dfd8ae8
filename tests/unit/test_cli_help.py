"""`--help` in Chinese: every text of every command, aligned, and no line too wide."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import typer

from memfit.cli import app, run
from memfit.cli.options import translated, without_default
from memfit.i18n import speaking
from memfit.printing import cells, wrap

ROOT: Any = typer.main.get_command(app)
COMMANDS = (None, *ROOT.commands)


def texts(command: Any) -> set[str]:
    found = {command.help, command.epilog, *(getattr(one, "help", None) for one in command.params)}
    return {text for text in found if text}


def every_text() -> set[str]:
    return set().union(*(texts(one) for one in (ROOT, *ROOT.commands.values())))


def page(capsys: pytest.CaptureFixture[str], name: str | None, *words: str) -> str:
    assert run([*([name] if name else []), "--help", *words]) == 0
    return capsys.readouterr().out


def test_every_help_text_has_chinese() -> None:
    plain = {without_default(text) for text in every_text()} | {"Show this message and exit."}
    assert len(plain) > 80
    with speaking("zh"):
        assert [text for text in plain if not re.search(r"[\u4e00-\u9fff]", translated(text))] == []


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [60, 80])
def test_chinese_help_is_aligned_and_no_line_is_too_wide(
    name: str | None,
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = page(capsys, name, "--lang", "zh")
    assert shown.startswith("用法：memfit")
    lines = shown.splitlines()
    assert max(map(cells, lines)) <= columns
    assert not [line for line in lines if line.lstrip()[:1] in set("，。；：、）")]
    options = shown.partition("\n选项：\n")[2].partition("\n\n")[0].splitlines()
    starts = {
        cells(line[: found.start("text")])
        for line in options
        if (found := re.match(r"  -.*?\S  +(?P<text>\S)", line))
    }
    assert len(starts) == 1
    # No sentence of the English page is left.
    assert not [text for text in every_text() if text in shown]


def test_what_is_default_or_required_is_said_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    assert "（默认 0.1）。" in page(capsys, "train", "--lang", "zh")
    assert "[默认 32]" in page(capsys, "estimate", "--lang", "zh")
    assert "[必填]" in page(capsys, "push", "--lang", "zh")
    with speaking("zh"):
        assert translated("Nobody has translated this (default 3).") == (
            "Nobody has translated this.（默认 3）。"
        )


def test_label_names_are_several_words_and_class_weights_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = page(capsys, "train")
    assert "--label-names <list[str]>" in shown
    assert "--class-weights <str>" in shown


def test_the_locale_decides_and_the_names_are_those_of_the_english_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    english = page(capsys, "ladder", "--lang", "en")
    assert english.casefold().startswith("usage: memfit ladder [options] [data]\n")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    monkeypatch.delenv("LANGUAGE", raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    chinese = page(capsys, "ladder")
    flags = [re.findall(r"^ +(-[^ ]+)", text, re.MULTILINE) for text in (english, chinese)]
    assert flags[0] == flags[1]
    assert len(flags[0]) > 25


def translate_once() -> None:
    with speaking("zh"):
        assert translated("Only you can see it.") == "只有你自己看得到。"


def test_english_help_waits_for_no_chinese() -> None:
    code = (
        "import sys; from memfit.cli import run; run(['train', '--help', '--lang', sys.argv[1]]);"
        "from memfit.i18n import _chinese;"
        "names = ('babel', 'rich.cells', 'rich.console');"
        "print(_chinese.cache_info().currsize, [name for name in names if name in sys.modules],"
        " file=sys.stderr)"
    )
    translate_once()  # compiles the catalogue of a checkout
    for spoken, said in (("en", "0 []\n"), ("zh", "1 ['rich.cells']\n")):
        done = subprocess.run(
            [sys.executable, "-c", code, spoken], capture_output=True, text=True, check=True
        )
        assert done.stderr == said


@pytest.mark.parametrize(
    ("words", "english", "chinese"),
    [
        (["trian"], "there is no command 'trian'. Did you mean 'train'?", "没有命令 'trian'。你是"),
        (["push"], "DIR is missing; see memfit push --help", "缺少 DIR；见 memfit push --help"),
        (["train", "--seed", "abc"], "--seed takes a whole number", "--seed 要一个整数"),
        (["train", "--validation-split", "x"], "--validation-split takes a number", "要一个数"),
        (["train", "-x"], "there is no option -x.", "没有选项 -x。"),
        (["train", "--bathc-size", "3"], "Did you mean --batch-size?", "你是不是要写 --batch-size"),
        (["train", "--json=3"], "--json takes no value", "--json 后面不跟值"),
        (["report", "a", "b"], "more was given than memfit report takes: b", "的参数多了：b"),
        (["estimate", "--model"], "--model needs a value", "--model 需要一个值"),
        (["train", "--bf16=maybe"], "--bf16 is 'maybe'; write true", "请写 true 或 false"),
        (["train", "--max-steps", "x"], "--max-steps is 'x'; it takes a whole", "它要一个整数"),
        (["train", "--lr-scheduler-kwargs", "{"], "is not JSON:", "不是 JSON："),
        (["estimate"], "no model given; name one with --model", "没有给出模型；请用 --model 指定"),
        (["predict", "m"], "give either sentences or --file", "请给出句子或 --file"),
        (["predict", "m", "x", "--output", "o"], "--output goes with --file", "要和 --file 一起用"),
        (["train", "--lang"], "--lang needs a value", "--lang 需要一个值"),
    ],
)
def test_wrong_usage_is_said_in_the_language_spoken(
    words: list[str],
    english: str,
    chinese: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for spoken, said in (("en", english), ("zh", chinese)):
        monkeypatch.setenv("MEMFIT_LANG", spoken)
        assert run(words) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""


def test_without_words_the_help_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--lang", "zh"]) == 2
    assert capsys.readouterr().err.startswith("用法：memfit [选项] 命令")


def test_chinese_wraps_anywhere_but_at_its_marks() -> None:
    text = "能放下的最快方案（显存），exact：数值相同；rounding：位数较少。"
    for width in range(12, 60):
        lines = wrap(text, width)
        assert "".join(lines) == text
        assert max(map(cells, lines)) <= width
        assert not [line for line in lines if line[0] in "，。；：、）" or line[-1] == "（"]
    assert wrap("words are kept whole", 9) == ["words are", "kept", "whole"]
    assert wrap("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert wrap("", 10) == []
    # However narrow the terminal is, nothing is lost.
    for width in (-3, 0, 1):
        assert "".join(wrap("能放下 ab", width)) == "能放下ab"
    # An accent that is a character by itself takes no column.
    assert wrap("e\u0301" * 10 + " x", 12) == ["e\u0301" * 10 + " x"]
