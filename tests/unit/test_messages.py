"""Every sentence in both languages, and which of them is spoken."""

from __future__ import annotations

import importlib
import re
import string
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit import messages
from memfit.cli import run
from memfit.cli.help_chinese import CHINESE as CHINESE_HELP
from memfit.cli.options import take_language
from memfit.errors import ConfigError
from memfit.messages import CATALOGUES, LANGUAGES, has, language, say, set_language, speaking, t

SOURCE = Path(__file__).resolve().parents[2] / "src" / "memfit"
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def fields(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


@pytest.mark.parametrize("catalogue", CATALOGUES)
def test_every_id_has_both_languages_with_the_same_fields(catalogue: str) -> None:
    found = importlib.import_module(CATALOGUES[catalogue]).MESSAGES
    assert len(found) > 10
    for name, by_language in found.items():
        assert by_language.keys() == set(LANGUAGES), name
        assert all(by_language.values()), name
        assert fields(by_language["en"]) == fields(by_language["zh"]), name
        assert "" not in fields(by_language["en"]), f"{name}: fields have names"
        assert not CHINESE.search(by_language["en"]), name


def test_nearly_all_of_the_report_differs_between_the_languages() -> None:
    found = importlib.import_module(CATALOGUES["report"]).MESSAGES
    same = {name for name, both in found.items() if both["en"] == both["zh"]}
    assert same == {"metric.f1", "metric.r2", "data.cut", "notebook.trainer"}


def test_every_id_the_report_asks_for_is_there_and_every_sentence_is_asked_for() -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (SOURCE / "report").iterdir()
        if path.suffix in (".py", ".html") and path.name != "messages.py"
    )
    asked = set(re.findall(r"""["'](report\.[a-z0-9_.]+[a-z0-9_])["']""", text)) - {"report.html"}
    assert len(asked) > 60
    assert sorted(message for message in asked if not has(message)) == []
    groups = set(re.findall(r"""["']report\.([a-z]+)\.(?:\{|["'])""", text))
    groups |= set(re.findall(r"""named\(["']([a-z]+)["']""", text)) | {"lead", "plan"}
    found = importlib.import_module(CATALOGUES["report"]).MESSAGES
    idle = [
        name
        for name in found
        if f"report.{name}" not in asked
        and name.partition(".")[0] not in groups
        and not name.endswith(".title")
    ]
    assert idle == []


SPOKEN = ("card", "cli", "data", "doctor", "error", "hub", "input", "live", "run", "shown")


def test_every_id_that_is_asked_for_is_there_and_every_sentence_is_asked_for() -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in SOURCE.rglob("*.py")
        if not path.name.endswith("messages.py") or path == SOURCE / "messages.py"
    )
    prefixes = "|".join(SPOKEN)
    asked = set(re.findall(rf"""["']((?:{prefixes})\.[a-z0-9_.]*[a-z0-9_])["']""", text))
    asked |= {f"error.{name}" for name in re.findall(r"""_said\(?["']([a-z.]+)["']""", text)}
    asked |= {f"error.{name}" for name in re.findall(r"""["'](stopped\.[a-z]+)["']""", text)}
    known = {
        f"{catalogue}.{name}"
        for catalogue in SPOKEN
        for name in importlib.import_module(CATALOGUES[catalogue]).MESSAGES
    }
    files = {"data.parquet", "run.toml", "run.json"}  # names of files look the same
    assert sorted(one for one in asked - known - files if "." in one.partition(".")[2]) == []
    assert len(asked & known) > 170
    # Whose last word is found out when it is asked for.
    groups = set(re.findall(rf"""f["']((?:{prefixes})(?:\.[a-z]+)+)\.\{{""", text))
    ends = (".login", ".header", ".positive", ".averaged")
    idle = [
        one
        for one in sorted(known - asked)
        if one.rpartition(".")[0] not in groups and not one.endswith(ends)
    ]
    assert idle == []


def test_what_is_said_in_chinese_is_chinese() -> None:
    for catalogue in SPOKEN:
        found = importlib.import_module(CATALOGUES[catalogue]).MESSAGES
        plain = [name for name, both in found.items() if not CHINESE.search(both["zh"])]
        figures = {"metric", "budget.asked", "plan", "failed.reason", "bar.of", "model"}
        figures |= {"ladder.files", "versions.cuda", "loss.stopped", "base.modelscope"}
        assert set(plain) <= figures, catalogue


# One word for one thing, in catalogues, help and documents alike; on the right what is not said.
TERMS = {
    "你": "您",
    "显存（主机的叫主机内存）": r"(?<!主机)(?<!共享)(?<!不占)内存",
    "主机内存": r"主存",
    "微批次": "微批(?!次)|小批量|微型批次",
    "重计算": "重算|重新计算",
    "激活": "激活值|激活函数值",
    "词元": "标记化|令牌化|记号",
    "分词器": "标记器|词元化器",
    "方案": "计划",
    "策略": "战略",
    "保真度": "忠实度",
    "学习率": "学习速率",
    "有效批": "等效批|实际批",
    "文件夹": "目录(?!$)",
    "登录": "登陆",
    "默认": "缺省",
    "梯级": "横档|台阶",
    "许可证": "执照|授权书",
    "优化器": "最优化器|优化程序",
}
ROOT = SOURCE.parents[1]
CHINESE_PAGES = (
    "README.zh.md", "notebooks/tutorial.zh.ipynb",
    *(f"docs/zh/{path.name}" for path in sorted((ROOT / "docs" / "zh").glob("*.md"))),
)  # fmt: skip


def chinese_texts() -> Iterator[tuple[str, str]]:
    for catalogue, module in CATALOGUES.items():
        for name, both in importlib.import_module(module).MESSAGES.items():
            yield f"{catalogue}.{name}", both["zh"]
    yield from CHINESE_HELP.items()
    for page in CHINESE_PAGES:
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").split("\n"), 1):
            yield f"{page}:{number}", line


@pytest.mark.parametrize("term", TERMS)
def test_one_chinese_word_is_used_for_one_thing(term: str) -> None:
    other = re.compile(TERMS[term])
    assert [(where, text) for where, text in chinese_texts() if other.search(text)] == []
    assert len(CHINESE_PAGES) >= 6


def test_a_sentence_is_filled_in_in_the_language_spoken() -> None:
    with speaking("zh"):
        assert t("report.memory.budget", bytes="4 GB") == "预算 4 GB"
        with speaking("en"):
            assert t("report.memory.budget", bytes="4 GB") == "budget 4 GB"
        with speaking(None):
            assert language() == "zh"
    assert say("report.step", {}, "zh") == "步"
    assert t("report.lead.steps", step=1200, steps=3000) == "step 1,200 of 3,000"


def test_a_field_nobody_gave_and_a_language_that_is_missing_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert t("report.memory.budget") == "budget {bytes}"
    found = importlib.import_module(CATALOGUES["report"])
    monkeypatch.setitem(found.MESSAGES, "only", {"en": "here"})
    assert say("report.only", {}, "zh") == "here"
    with pytest.raises(KeyError, match="no catalogue 'nothing'"):
        t("nothing.at.all")
    assert not has("nothing.at.all")
    assert not has("report.nothing")


@pytest.mark.parametrize(
    ("environment", "spoken"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW"}, "zh"),
        ({"LC_ALL": "zh_HK.UTF-8", "LANG": "en_US.UTF-8"}, "zh"),
        ({"LC_MESSAGES": "en_US.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh"),
        ({"LC_ALL": "C.UTF-8", "LANGUAGE": "zh_CN"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "MEMFIT_LANG": "en"}, "en"),
        ({"LANG": "en_US.UTF-8", "MEMFIT_LANG": "zh-CN"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "MEMFIT_LANG": "klingon"}, "en"),
    ],
)
def test_the_environment_says_which_language(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], spoken: str
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE", "MEMFIT_LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert language() == spoken


def test_a_language_that_is_set_stays_and_is_not_another_threads() -> None:
    found: list[str] = []
    try:
        set_language("zh_TW")
        thread = threading.Thread(target=lambda: found.append(language()))
        thread.start()
        thread.join()
        assert (language(), found) == ("zh", ["en"])
    finally:
        set_language(None)
    assert language() == "en"


def test_a_language_there_is_not_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="write --lang en or --lang zh"):
        messages.checked("fr")


@pytest.mark.parametrize(
    ("words", "rest", "spoken"),
    [
        (["--lang", "zh", "train", "a.csv"], ["train", "a.csv"], "zh"),
        (["train", "a.csv", "--lang=en"], ["train", "a.csv"], "en"),
        (["predict", "run", "--", "--lang", "zh"], ["predict", "run", "--", "--lang", "zh"], None),
        (["train"], ["train"], None),
    ],
)
def test_the_option_is_taken_wherever_it_stands(
    words: list[str], rest: list[str], spoken: str | None
) -> None:
    assert take_language(words) == (rest, spoken)


def test_the_command_line_speaks_the_language_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('[model]\nmodel = "m"\n')
    assert run(["report", str(tmp_path), "--lang", "zh"]) == 0
    assert 'lang="zh-Hans"' in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run(["--lang", "en", "report", str(tmp_path)]) == 0
    assert 'lang="en"' in (tmp_path / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert run(["report", "--lang", "fr", str(tmp_path)]) == 2
    assert "no language 'fr'" in capsys.readouterr().err
    assert run(["report", str(tmp_path), "--lang"]) == 2
    assert "--lang needs a value" in capsys.readouterr().err
