"""Screenshots of the terminal: real commands at a terminal of 80 columns, seen in a browser."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import browser as browsers
import pytest
from browser import Browser
from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from terminal import at_a_terminal

COLUMNS = 80
PRAISE = ("服務人員都很親切", "房間很乾淨，床也很舒服，下次還會再來", "位置方便，早餐好吃")
BLAME = ("服務人員都不親切", "房間很髒，空調太吵，再也不會來了", "位置偏僻，早餐難吃，價格還很貴")
_STYLE = """
body { background: #0c0c0c; color: #d9d9d9; margin: 12px }
div { font: 16px/22px 'DejaVu Sans Mono', 'Noto Sans Mono CJK SC', monospace; height: 22px;
      white-space: pre }
i { font-style: normal; display: inline-block; height: 22px; vertical-align: top; width: 10px;
    text-align: center }
i.c2 { width: 20px } i.c0 { width: 0 }
"""
_MOVES = re.compile(r"\x1b\[(\d*)([AKJ])|\x1b\[\?\d+[lh]|(\r?\n)|(\r)")
_SGR = re.compile(r"\x1b\[[\d;]*m")


def last_screen(printed: str) -> list[str]:
    """What is left to see: rich moves the cursor by whole lines and writes them anew."""
    lines, row, begun = [""], 0, 0
    for move in [*_MOVES.finditer(printed), None]:
        lines[row] += printed[begun : move.start() if move else len(printed)]
        if move is None:
            break
        begun = move.end()
        if move[2] == "A":
            row = max(row - int(move[1] or 1), 0)
        elif move[2] == "K" or move[4]:
            lines[row] = "" if move[2] == "K" else lines[row]
        elif move[3]:
            row += 1
            lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def plain(lines: list[str]) -> list[str]:
    return [_SGR.sub("", line).rstrip() for line in lines]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("screens") / "reviews.csv"
    rows = [f"{text},{label}" for _ in range(10) for label, texts in
            (("正評", PRAISE), ("負評", BLAME)) for text in texts]  # fmt: skip
    path.write_text("\n".join(["review,label", *(row.replace("，", " ") for row in rows)]))
    return path


# One command after the other in one process: torch is imported once.
_COMMANDS = """
import json, sys
from memfit.cli import run
for words in json.loads(sys.argv[1]):
    assert run(words) == 0
    print(sys.argv[2], flush=True)
"""
_MARK = "---- done ----"


def at_80_columns(*commands: list[str]) -> list[list[str]]:
    """The screen each command leaves."""
    environment = {
        **os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1",
        "LINES": "40",
    }  # fmt: skip
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-c", _COMMANDS, json.dumps(commands), _MARK]
    code, printed = at_a_terminal(command, [], environment)
    assert code == 0, printed
    *screens, rest = printed.split(f"{_MARK}\r\n")
    assert rest == ""
    return [last_screen(screen) for screen in screens]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture(scope="module")
def screens(reviews: Path, tiny_model_dir: Path, run_folder: Path) -> dict[str, list[str]]:
    """What `memfit train` and `memfit plan` leave on the screen, in Chinese."""
    common = [
        str(reviews), "--model", str(tiny_model_dir), "--budget", "1GB", "--max-length", "32",
        "--lang", "zh",
    ]  # fmt: skip
    training = ["--epochs", "2", "--batch-size", "8", "--output-dir", str(run_folder), "--exact"]
    train, plan = at_80_columns(["train", *common, *training], ["plan", *common])
    return {"train": train, "plan": plan}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser | None]:
    if browsers.find() is None:
        yield None
        return
    tab = Browser(tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


def as_page(lines: list[str]) -> str:
    """A terminal's grid: every character as wide as the cells it takes."""
    console = Console(width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="256")
    rows = []
    for line in lines:
        cells = ""
        for text, style, _ in console.render(Text.from_ansi(line, no_wrap=True, overflow="ignore")):
            look = style.get_html_style(MONOKAI) if style else ""
            cells += "".join(
                f'<i class=c{cell_len(char)} style="{look}">{escape(char)}</i>'
                for char in text.rstrip("\n")
            )
        rows.append(f"<div>{cells}</div>")
    return f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>{''.join(rows)}"


def photographed(lines: list[str], seen: Browser | None, path: Path) -> None:
    """A picture of the screen, with every word of it, and its columns where they belong."""
    page = path.with_suffix(".html")
    page.write_text(as_page(lines), encoding="utf-8")
    if seen is None:
        return
    seen.look_like(900, 30 + 22 * len(lines))
    seen.open(page.as_uri())
    shown = seen.run("[...document.querySelectorAll('div')].map((row) => row.textContent)")
    assert [line.rstrip() for line in shown] == plain(lines)
    assert seen.screenshot(path).stat().st_size > 20_000


def test_a_run_in_chinese_at_80_columns(
    screens: dict[str, list[str]], run_folder: Path, tmp_path: Path, seen: Browser | None
) -> None:
    lines = screens["train"]
    photographed(lines, seen, tmp_path / "train.png")
    text = plain(lines)
    for begin in (
        "列  ",
        "行数  ",
        "类别  ",
        "词元  ",
        "模型 ",
        "预算 ",
        "方案 ",
        "批次 ",
        "训练：14 步，约 ",
    ):
        assert any(line.startswith(begin) for line in text), begin
    (bar,) = (line for line in text if line.startswith("训练中 ━"))
    assert re.search(r"━ 14/14 [\d,]+ 词元/秒$", bar)
    assert cell_len(bar) == COLUMNS
    status = text[text.index(bar) + 1]
    assert re.fullmatch(r"损失 \d\.\d{4}  f1 \d\.\d{4}  进程 [\d.]+ MiB", status)
    assert any(line.startswith("第 2.00 轮：f1 ") for line in text)
    assert any("已完成，14 步，2 轮" in line for line in text)
    paths = [line for line in text if str(run_folder) in line]
    assert len(paths) >= 2
    elsewhere = str(run_folder.parent.parent)
    assert max(cell_len(line) for line in text if elsewhere not in line) <= COLUMNS


def test_a_plan_in_chinese_at_80_columns(
    screens: dict[str, list[str]], tiny_model_dir: Path, tmp_path: Path, seen: Browser | None
) -> None:
    lines = screens["plan"]
    photographed(lines, seen, tmp_path / "plan.png")
    text = plain(lines)
    assert any(line.startswith("整个运行的最高点  ") for line in text)
    assert {"各项决定", "更多许可能达到什么"} <= set(text)
    assert max(cell_len(line) for line in text if str(tiny_model_dir) not in line) <= COLUMNS
