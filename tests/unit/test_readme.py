"""The documents are true: their tree, links, commands, Python, signatures and figures."""

from __future__ import annotations

import ast
import csv
import inspect
import itertools
import json
import pkgutil
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import run

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
PAGES = [ENGLISH, CHINESE, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
BASE_MODEL, LARGE_MODEL = "google-bert/bert-base-chinese", "hfl/chinese-macbert-large"


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    found = [Block(*match) for match in _FENCE.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[str]:
    """Every line that starts with memfit in a bash block."""
    lines = itertools.chain.from_iterable(b.text.splitlines() for b in blocks(page, "bash"))
    return [line for line in lines if line.startswith("memfit ")]


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """Instead of the shared one: a reader's second command finds what the first one kept."""


# ---- the tree ----


def tree_of(page: Path) -> dict[str, str]:
    """The files the tree names, with their comments."""
    (text,) = (b.text for b in blocks(page, "text") if b.text.startswith("src/memfit/\n"))
    found: dict[str, str] = {}
    folder = ""
    for line in text.splitlines()[1:]:
        name, _, comment = line.strip().partition(" ")
        if name.endswith("/"):
            folder = name
            continue
        path = name if line.startswith("  ") and line[2] != " " else folder + name
        assert path not in found, f"{path} is in the tree twice"
        found[path] = comment.strip()
    return found


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=lambda page: page.name)
def test_the_tree_names_every_file_and_says_what_it_is(page: Path) -> None:
    source = ROOT / "src" / "memfit"
    files = {path.relative_to(source).as_posix(): path for path in source.rglob("*.py")}
    tree = tree_of(page)
    lacking = {
        name: (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
        for name, path in files.items()
        if name not in tree
    }
    assert lacking == {}, "write these into the tree"
    assert sorted(tree.keys() - files.keys()) == [], "these are gone: take them out of the tree"
    assert [name for name, comment in tree.items() if not comment] == []


# ---- links and languages ----


def anchors(page: Path) -> set[str]:
    """The headings as GitHub turns them into anchors."""
    return {
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        for _, title in _HEADING.findall(prose(page))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def test_the_chinese_readme_has_the_sections_commands_and_code_of_the_english_one() -> None:
    levels = [[len(marks) for marks, _ in _HEADING.findall(prose(p))] for p in (ENGLISH, CHINESE)]
    assert levels[0] == levels[1]

    def told(text: str) -> str:
        """What a command prints in either language: the figures with a unit."""
        return " ".join(sorted(re.findall(r"[\d.,]+ (?:GiB|MiB|GB|ms)", " ".join(text.split()))))

    def code(page: Path) -> list[tuple[str, str]]:
        # Comments are translated; the tree and its comments have a test of their own.
        return [
            (one.language, told(one.text) if one.language == "text" else uncommented(one.text))
            for one in blocks(page)
            if not one.text.startswith("src/memfit/\n")
        ]

    def uncommented(text: str) -> str:
        return re.sub(r" *#.*", "", text)

    assert code(CHINESE) == code(ENGLISH)
    assert len(code(ENGLISH)) > 10
    links = [
        [link for link in _LINK.findall(prose(page)) if link.startswith(("docs/", "http"))]
        for page in (ENGLISH, CHINESE)
    ]

    def in_chinese(link: str) -> str:
        path = link.partition("#")[0]
        own = path.replace("docs/", "docs/zh/", 1)
        return own if (ROOT / own).is_file() else path.replace(".svg", ".zh.svg")

    *found, index = links[1]
    assert [link.partition("#")[0] for link in found] == [in_chinese(link) for link in links[0]]
    assert ["#" in link for link in found] == ["#" in link for link in links[0]]
    assert index == "docs/zh/index.md"


# ---- figures ----


def test_tables_and_pictures_say_what_the_committed_results_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import document

    assert [path.name for path in document.outdated()] == []
    stale = ENGLISH.read_text(encoding="utf-8").replace("0.", "7.")
    assert document.filled(stale) != stale


def test_every_script_a_page_names_is_there() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"\b(?:benchmarks|tests|examples)/[\w/.]+\.\w+", prose(page))
    }
    assert "benchmarks/memory_gpu.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


# ---- commands and code ----


def write_table(path: Path, rows: int, *, labelled: bool) -> None:
    words = ("服務人員都不親切", "服務人員都很親切")
    lines = [("label", "review")]
    lines += [(str(n % 2), words[n % 2] + "早餐好吃"[: n % 5] * (n // 7)) for n in range(rows)]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines if labelled else [line[1:] for line in lines])


@pytest.fixture(scope="module")
def base_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with as many positions as a published one."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("base-model")
    config = BertConfig.from_pretrained(tiny_model_dir, max_position_embeddings=512)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tables the README speaks of, and it is the current one."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (("reviews.csv", 60), ("new.csv", 5), ("test.csv", 12)):
        write_table(tmp_path / name, rows, labelled=name != "new.csv")
    return tmp_path


def config_folder(folder: Path, **sizes: int) -> Path:
    """A folder that holds only a config.json: BERT-Large, or smaller."""
    large = {
        "vocab_size": 21128, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 512,
    }  # fmt: skip
    folder.mkdir()
    text = json.dumps({"model_type": "bert", **large, **sizes})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_the_readmes_commands_run_one_after_the_other(
    desk: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = config_folder(
        desk / "small", hidden_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    first, *rest = commands(ENGLISH)
    for command in [first, *rest]:
        words = shlex.split(command.replace(BASE_MODEL, "BASE").replace(LARGE_MODEL, "LARGE"))[1:]
        words = [{"BASE": str(base_model), "LARGE": str(small)}.get(word, word) for word in words]
        if command == first:
            words += ["--max-steps", "1", "--output-dir", "first"]
        if words[0] == "ladder":
            continue  # each rung has a process of its own: tests/e2e/test_ladder_command.py runs it
        assert run(words) == 0, f"{command}: {capsys.readouterr().err}"
    capsys.readouterr()
    assert (desk / "again" / "summary.json").is_file()
    labelled = (desk / "labelled.csv").read_text(encoding="utf-8").splitlines()
    assert labelled[0] == "\ufeffreview,label,score"
    assert len(labelled) == 6
    assert (desk / "step.html").is_file()


def test_other_pages_show_commands_the_readme_shows() -> None:
    known = set(commands(ENGLISH))
    for page in PAGES[2:]:
        assert set(commands(page)) <= known


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # plain arguments on a CPU
def test_the_readmes_python_runs(
    desk: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    for block in blocks(ENGLISH, "python"):
        code = block.text.replace(f'"{BASE_MODEL}"', repr(str(base_model)))
        exec(compile(code, str(ENGLISH), "exec"), names)
    assert (desk / "run-py" / "model.safetensors").is_file()
    assert names["trainer"].state.global_step == 4  # 54 rows, effective batch 32, two epochs
    printed = capsys.readouterr().out
    assert "'f1'" in printed
    assert "MicroBatching(" in printed


def test_the_estimate_shown_is_the_estimate_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks(ENGLISH, "console")
    command, _, shown = block.text.partition("\n")
    large = config_folder(tmp_path / "large")
    words = shlex.split(command.removeprefix("$ memfit ").replace(LARGE_MODEL, str(large)))
    assert run(words) == 0
    made = capsys.readouterr().out

    def plain(text: str) -> list[str]:
        # The bar may shift by a character.
        lines = (line.split() for line in text.splitlines() if not set(line) & set("█│"))
        return [_NUMBER.sub("#", word) for line in lines for word in line]

    def numbers(text: str) -> list[float]:
        return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]

    assert plain(made) == plain(shown)
    assert numbers(made) == pytest.approx(numbers(shown), rel=0.02)


# ---- the Python interface ----


def is_signature(text: str) -> bool:
    """`memfit.name(parameters)` and nothing else: how the page writes a signature."""
    return re.fullmatch(r"memfit\.[\w.]+\(.*\)\s*", text, re.DOTALL) is not None


SIGNATURES = [
    block.text.strip()
    for block in blocks(ROOT / "docs" / "python-api.md", "python")
    if is_signature(block.text)
]


@pytest.mark.parametrize("written", SIGNATURES, ids=lambda text: text.partition("(")[0])
def test_a_signature_is_written_as_it_is(written: str) -> None:
    name, _, parameters = written.partition("(")
    made: dict[str, Any] = {}
    exec(compile(f"def function({parameters}: ...", name, "exec"), made)
    real = inspect.signature(pkgutil.resolve_name(name))
    shown = inspect.signature(made["function"])
    plain = [
        [(p.name, p.kind, p.default) for p in signature.parameters.values()]
        for signature in (real, shown)
    ]
    assert plain[0] == plain[1]


def test_every_public_name_is_described() -> None:
    import memfit

    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    public = set(memfit.__all__) - {"__version__"}
    assert [name for name in sorted(public) if f"memfit.{name}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_every_page_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        if not is_signature(block.text):
            ast.parse(block.text)


def test_the_strategy_shown_is_the_strategy_there_is() -> None:
    page, file = ROOT / "docs" / "adding-a-strategy.md", "src/memfit/strategies/packing.py"
    shown = next(b.text for b in blocks(page, "python") if "class Packing" in b.text)
    real = (ROOT / file).read_text(encoding="utf-8")
    bodies = [ast.unparse(ast.parse(text).body[1:]) for text in (shown, real)]  # not the docstring
    assert bodies[0] == bodies[1]


def test_the_contract_of_a_strategy_is_described_whole() -> None:
    from memfit.strategies import Fidelity, Setup, Strategy

    page = (ROOT / "docs" / "adding-a-strategy.md").read_text(encoding="utf-8")
    members = [name for name in (*Strategy.__annotations__, *vars(Strategy)) if name[0] != "_"]
    names = {*Setup.__dataclass_fields__, *members, *(item.name for item in Fidelity)}
    assert [name for name in sorted(names) if not re.search(rf"`{name}(?:\(\w*\))?`", page)] == []
