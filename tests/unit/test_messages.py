"""Every sentence in both languages, and which of them is spoken."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import json
import os
import pickle
import re
import shutil
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from babel.messages.catalog import Catalog

from memfit import i18n as messages
from memfit.cli import run
from memfit.cli.options import take_language
from memfit.errors import ConfigError
from memfit.i18n import (
    N_,
    NP_,
    Message,
    language,
    message_of,
    nt,
    pt,
    set_language,
    shown,
    speaking,
    t,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "memfit"
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@functools.cache
def tool() -> Any:
    """scripts/messages.py, which `make messages` runs."""
    spec = importlib.util.spec_from_file_location("messages_tool", ROOT / "scripts/messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def extracted() -> Catalog:
    return tool().extracted()


@pytest.fixture(scope="module")
def catalogue() -> Catalog:
    return tool().kept()


THE_SAME_IN_CHINESE = {
    "BudgetTrainer", "CUDA graphs", "F1", "LoRA", "R²", "TrainingArguments: {note}",
    "`{name}` (ModelScope)", "max_length {tokens:,}", "torch {version} (CUDA {cuda})",
    "{folder}: ladder.json, ladder.md", "{metric} (of {class_name})",
    "{what} in {where}",
}  # fmt: skip


def keys(catalogue: Catalog) -> set[tuple[str | None, Any]]:
    return {(one.context, one.id) for one in catalogue if one.id}


def fields(template: str) -> set[tuple[str, str, str | None]]:
    """The fields of a sentence, with how each is formatted."""
    found = string.Formatter().parse(template)
    return {(name, spec or "", how) for _, name, spec, how in found if name is not None}


def texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def test_the_catalogue_has_every_sentence_of_the_code_and_no_other(
    extracted: Catalog, catalogue: Catalog
) -> None:
    assert len(keys(extracted)) > 1000
    assert sorted(map(str, keys(extracted) - keys(catalogue))) == []
    assert sorted(map(str, keys(catalogue) - keys(extracted))) == []
    assert not catalogue.obsolete
    assert [one.id for one in catalogue if one.id and one.fuzzy] == []


def test_every_sentence_has_chinese_with_the_same_fields(catalogue: Catalog) -> None:
    for one in catalogue:
        if not one.id:
            continue
        *_, english = texts(one.id)
        for chinese in texts(one.string):
            assert chinese.strip(), one.id
            assert fields(chinese) == fields(english), one.id
        assert "" not in {name for name, *_ in fields(english)}, f"{one.id}: fields have names"
        assert not CHINESE.search(english), one.id


def test_what_is_said_in_chinese_is_chinese(catalogue: Catalog) -> None:
    plain = {
        one.id
        for one in catalogue
        if one.id and not any(CHINESE.search(text) for text in texts(one.string))
    }
    words = {one for one in plain if re.search("[A-Za-z]", re.sub(r"\{[^}]*\}", "", one))}
    assert sorted(words - THE_SAME_IN_CHINESE) == []


def test_every_marked_text_of_the_code_is_extracted(extracted: Catalog) -> None:
    """Babel does not look into f-strings, and overlooks some nested calls."""
    known = {text for one in extracted if one.id for text in texts(one.id)}
    places = tool().KEYWORDS
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            for place in places.get(call.func.id, ()):
                if isinstance(place, int) and len(call.args) >= place:
                    given = call.args[place - 1]
                    if isinstance(given, ast.Constant):
                        assert given.value in known, f"{path}:{call.lineno}"


def test_no_sentence_is_made_of_an_f_string() -> None:
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in tool().KEYWORDS:
                assert not any(isinstance(one, ast.JoinedStr) for one in call.args), (
                    f"{path}:{call.lineno}"
                )


def test_warnings_can_be_translated() -> None:
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and call.args:
                name = getattr(call.func, "id", None) or getattr(call.func, "attr", "")
                plain = isinstance(call.args[0], ast.JoinedStr | ast.Constant)
                assert not (plain and name == "warn"), f"{path}:{call.lineno}"


def test_a_sentence_nobody_translated_fails_the_update(extracted: Catalog, tmp_path: Path) -> None:
    one = tool.__wrapped__()  # its own, since the file is replaced
    one.extracted = lambda: copy.deepcopy(extracted)
    one.CATALOGUE = tmp_path / "memfit.po"
    text = messages.CATALOGUE.read_text(encoding="utf-8")
    assert 'msgid "budget {bytes}"\nmsgstr "预算 {bytes}"\n' in text
    less = text.replace('msgid "budget {bytes}"\nmsgstr "预算 {bytes}"\n', "")
    one.CATALOGUE.write_text(less, encoding="utf-8")
    assert one.main() == 1
    assert 'msgid "budget {bytes}"\nmsgstr ""\n' in one.CATALOGUE.read_text(encoding="utf-8")
    one.CATALOGUE.write_text(text, encoding="utf-8")
    assert one.main() == 0
    updated = one.CATALOGUE.read_text(encoding="utf-8")
    assert one.main() == 0
    assert one.CATALOGUE.read_text(encoding="utf-8") == updated


def test_the_catalogue_is_compiled_at_its_first_use_and_again_when_it_changed(
    tmp_path: Path,
) -> None:
    shutil.copytree(SOURCE, tmp_path / "memfit", ignore=shutil.ignore_patterns("*.mo"))
    folder = tmp_path / "memfit" / "locale" / "zh_CN" / "LC_MESSAGES"
    code = "from memfit.i18n import t; print(t('budget {bytes}', bytes='4 GB'))"

    def said(spoken: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MEMFIT_LANG": spoken}
        environment["PYTHONIOENCODING"] = "utf-8"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    assert said("en") == "budget 4 GB"
    assert not (folder / "memfit.mo").exists()
    assert said("zh") == "预算 4 GB"
    po, mo = folder / "memfit.po", folder / "memfit.mo"
    po.write_text(po.read_text(encoding="utf-8").replace("预算 {bytes}", "预 {bytes}"), "utf-8")
    os.utime(po, ns=(0, mo.stat().st_mtime_ns + 10**9))
    assert said("zh") == "预 4 GB"
    po.unlink()  # as in a wheel
    assert said("zh") == "预 4 GB"
    mo.unlink()
    assert said("zh") == "budget 4 GB"


# One word for one thing, in catalogues, help and documents alike; on the right what is not said.
TERMS = {
    "你": "您",
    "显存（主机的叫主机内存，两者都可以是的叫设备内存，表头叫内存）": (
        r"(?<!主机)(?<!共享)(?<!不占)(?<!设备)(?!^内存$)内存"
    ),
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
CHINESE_PAGES = (
    "README.zh.md", "notebooks/tutorial.zh.ipynb",
    *(f"docs/zh/{path.name}" for path in sorted((ROOT / "docs" / "zh").glob("*.md"))),
)  # fmt: skip


@functools.cache
def chinese_texts() -> list[tuple[str, str]]:
    return list(_chinese_texts())


def _chinese_texts() -> Iterator[tuple[str, str]]:
    for one in tool().kept():
        if one.id:
            yield from ((str(one.id), text) for text in texts(one.string))
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
        assert t("budget {bytes}", bytes="4 GB") == "预算 4 GB"
        with speaking("en"):
            assert t("budget {bytes}", bytes="4 GB") == "budget 4 GB"
        with speaking(None):
            assert language() == "zh"
    assert t("step {step:,} of {steps:,}", step=1200, steps=3000) == "step 1,200 of 3,000"


def test_one_english_text_has_another_translation_in_another_context() -> None:
    with speaking("zh"):
        assert (t("Memory"), pt("heading", "Memory")) == ("内存", "显存占用")
        assert t(NP_("heading", "Memory")) == "显存占用"
    assert pt("heading", "Memory") == t(NP_("heading", "Memory")) == "Memory"
    assert N_("Memory") == "Memory"


def test_one_and_several_are_told_apart_where_the_language_does() -> None:
    assert nt("one layer", "{count} layers", 1) == "one layer"
    assert nt("one layer", "{count} layers", 3) == "3 layers"
    with speaking("zh"):
        assert nt("one layer", "{count} layers", 1) == "1 层"
        assert nt("one layer", "{count} layers", 3) == "3 层"


def test_a_field_nobody_gave_and_a_sentence_without_chinese_cost_nothing() -> None:
    assert t("budget {bytes}") == "budget {bytes}"
    with speaking("zh"):
        assert t("nobody has translated {what}", what="this") == "nobody has translated this"
        assert pt("nowhere", "Memory") == "Memory"


def test_a_message_is_english_until_it_is_shown() -> None:
    inner = Message("a {device} has no cuBLAS", device="cpu")
    said = Message("{strategy} cannot be used here: {reason}", strategy="x", reason=inner)
    assert said == "x cannot be used here: a cpu has no cuBLAS"
    assert json.dumps(said) == '"x cannot be used here: a cpu has no cuBLAS"'
    assert said.shown("zh") == "x 在这里不能用：cpu 没有 cuBLAS"
    with speaking("zh"):
        assert said.startswith("x cannot")
        assert shown(said) == said.shown("zh")
        assert str(ConfigError(said)) == said.shown("zh")
        assert t("note: {text}", text=inner) == "注意：cpu 没有 cuBLAS"
    assert str(ConfigError(said)) == said
    assert shown("plain {text}") == "plain {text}"


def test_a_message_can_be_kept_copied_and_sent() -> None:
    inner = Message("a {device} has no cuBLAS", device="{odd}")
    said = Message("{strategy} cannot be used here: {reason}", strategy="x", reason=inner)
    stored = json.loads(json.dumps(said.as_json()))
    for one in (message_of(stored), copy.deepcopy(said), pickle.loads(pickle.dumps(said))):
        assert one == said
        assert shown(one, "zh") == "x 在这里不能用：{odd} 没有 cuBLAS"
    assert message_of("as it is") == "as it is"


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
    with pytest.raises(ValueError, match="write --lang en or --lang zh"):
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
