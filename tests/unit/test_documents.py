"""The documents hold together: links, languages, figures, the tree, signatures, strategies."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memfit.strategies import ORDER, Strategy

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "memfit"
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
GENERATED = DOCS / "strategies"
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
WRITTEN = [
    *sorted(ROOT.glob("*.md")),
    *(path for path in sorted(DOCS.rglob("*.md")) if GENERATED not in path.parents),
]


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    """What writes the strategies' pages when the site is built."""
    sys.path.insert(0, str(DOCS))
    try:
        yield importlib.import_module("strategy_pages")
    finally:
        sys.path.remove(str(DOCS))


@pytest.mark.parametrize("name", ["cards", "zh/cards"])
def test_the_page_on_cards_lists_every_card_generation_and_source(
    maker: ModuleType, name: str
) -> None:
    assert maker
    card_pages = importlib.import_module("card_pages")
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    made = card_pages.completed(page, card_pages.PAGES[name])
    known = card_pages.facts()
    for one in (*known["cards"], *known["generations"], *known["sources"]):
        assert made.count(f"\n| {one} | ") == 1, one
    assert "| GeForce GTX 1650 4GB | 3.81 | 3.73 | 3.01 | 91–381 |" in made
    assert "<!--" not in made


@pytest.fixture(scope="module")
def generated(maker: ModuleType) -> dict[Path, str]:
    return {GENERATED / name: text for name, text in maker.pages().items()}


@pytest.fixture(scope="module")
def texts(generated: dict[Path, str]) -> dict[Path, str]:
    """Every page there is, written by hand or by the build."""
    command_pages = importlib.import_module("command_pages")
    written = {path: path.read_text(encoding="utf-8") for path in WRITTEN}
    commands = {
        DOCS / f"{name}.md": command_pages.completed(written[DOCS / f"{name}.md"], spoken)
        for name, spoken in command_pages.PAGES.items()
    }
    return written | commands | generated


def prose(text: str) -> str:
    return _INLINE.sub("", _FENCE.sub("", text))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language."""
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [match["body"] for match in found if match["info"] == language]


def anchors(text: str) -> set[str]:
    """The headings as GitHub and MyST turn them into anchors."""
    plain = _FENCE.sub("", text)
    return {
        re.sub(r"[^\w\- ]", "", title.replace("`", "").strip().lower()).replace(" ", "-")
        for _, title in _HEADING.findall(plain)
    }


# ---- links ----


def test_every_relative_link_and_anchor_of_every_page_resolves(texts: dict[Path, str]) -> None:
    dead, checked = [], 0
    for page, text in texts.items():
        for link in _LINK.findall(prose(text)):
            if link.startswith(("http://", "https://")):
                continue
            checked += 1
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            there = target in texts or target.exists()
            if not there or (anchor and anchor not in anchors(texts[target])):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []
    assert checked > 60


def test_links_to_other_sites_are_https(texts: dict[Path, str]) -> None:
    plain = [
        f"{page.name}: {link}"
        for page, text in texts.items()
        for link in _LINK.findall(prose(text))
        if link.startswith("http://")
    ]
    assert plain == []


def test_every_script_a_page_names_is_there(texts: dict[Path, str]) -> None:
    named = {
        name
        for text in texts.values()
        for name in re.findall(
            r"\b(?:benchmarks|tests|examples|notebooks)/[\w/.]+\.\w+", _FENCE.sub("", text)
        )
    }
    assert "benchmarks/memory_gpu.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


# ---- figures ----


def test_tables_and_pictures_say_what_the_committed_results_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import document

    assert [path.name for path in document.outdated()] == []
    stale = ENGLISH.read_text(encoding="utf-8").replace(" ms |", " s |")
    assert document.filled(stale) != stale


def test_every_marked_block_is_on_a_page_that_is_filled(
    texts: dict[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import document

    marked = {page for page, text in texts.items() if "\n<!-- figures: " in text}
    assert marked == {ROOT / name for name in document.PAGES}
    shown = {name for page in marked for name in re.findall(r"<!-- figures: ([\w-]+)", texts[page])}
    assert shown == set(document.BLOCKS)


# ---- the tree ----


def page_of_the_tree(folder: Path) -> tuple[set[str], str]:
    """What the tree names, and the whole page."""
    page = folder / "architecture.md"
    tree = next(text for text in blocks(page, "text") if text.startswith("src/memfit/\n"))
    return {line.split()[0] for line in tree.splitlines()[1:]}, page.read_text(encoding="utf-8")


def entries() -> set[str]:
    """What lies at the package's root, as the page writes it."""
    files = {path.name for path in SOURCE.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")} | {"locale/"}
    return (files | folders) - {"__init__.py", "__main__.py", "_compat.py", "_version.py"}


@pytest.mark.parametrize("folder", [DOCS, DOCS / "zh"], ids=["en", "zh"])
def test_every_package_is_in_the_tree(folder: Path) -> None:
    named, _ = page_of_the_tree(folder)
    assert named == entries()


@pytest.mark.parametrize("folder", [DOCS, DOCS / "zh"], ids=["en", "zh"])
def test_every_file_the_page_of_the_tree_names_is_there(folder: Path) -> None:
    named, page = page_of_the_tree(folder)
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", page.replace("`src/memfit/", "`"))
    inside = [name for name in files if f"{name.split('/')[0]}/" in named]
    assert len(inside) > 8
    assert [name for name in inside if not (SOURCE / name).is_file()] == []


# ---- the table of contents ----


def toctree(text: str) -> list[str]:
    return [
        line
        for match in _FENCE.finditer(text)
        if match["info"] == "{toctree}"
        for line in match["body"].splitlines()
        if line and not line.startswith(":")
    ]


def test_every_page_of_the_site_is_in_its_table_of_contents(texts: dict[Path, str]) -> None:
    pages = {path for path in texts if DOCS in path.parents}
    reached, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        todo += [page.parent / f"{entry}.md" for entry in toctree(texts[page])]
    assert reached == pages


# ---- a page for every strategy ----


def test_every_strategy_of_the_registry_has_its_page(generated: dict[Path, str]) -> None:
    expected = {GENERATED / "index.md", *(GENERATED / f"{kind.name}.md" for kind in ORDER)}
    assert generated.keys() == expected


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.name)
def test_a_page_says_what_the_class_says(kind: type[Strategy], generated: dict[Path, str]) -> None:
    page = generated[GENERATED / f"{kind.name}.md"]
    assert page.startswith(f"# {kind.name}\n")
    assert kind.reason[1:] in page
    assert f"| shrinks | {', '.join(kind.shrinks)} |" in page
    assert f"| fidelity | `{kind().fidelity}`: " in page
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        (row,) = re.findall(rf"^\| `{field.name}` \|.*$", page, re.MULTILINE)
        assert f"| `{field.default!r}` |" in row
    for other in kind.conflicts:
        assert f"[{other}]({other}.md)" in page
        assert f"[{kind.name}]({kind.name}.md)" in generated[GENERATED / f"{other}.md"]
    module = sys.modules[kind.__module__].__doc__
    assert module is not None
    assert module.splitlines()[0] in page


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.name)
def test_the_example_of_a_page_makes_the_strategy(
    kind: type[Strategy], generated: dict[Path, str]
) -> None:
    (block,) = [
        match["body"]
        for match in _FENCE.finditer(generated[GENERATED / f"{kind.name}.md"])
        if match["info"] == "python"
    ]
    made: list[Strategy] = []

    def trainer(*_: object, strategies: list[Strategy], **__: object) -> None:
        made.extend(strategies)

    tree = ast.parse(block)
    tree.body = [one for one in tree.body if "BudgetTrainer" not in ast.unparse(one).split("\n")[0]
                 or isinstance(one, ast.Assign)]  # fmt: skip
    names = {"BudgetTrainer": trainer, "model": None, "args": None, "rows": None}
    exec(compile(tree, kind.name, "exec"), names)
    assert type(made[-1]) is kind


def test_settings_that_change_the_fidelity_are_named(generated: dict[Path, str]) -> None:
    offload = generated[GENERATED / "optimizer_offload.md"]
    assert "`rounding` with `dtype='bfloat16'`" in offload
    release = generated[GENERATED / "gradient_release.md"]
    assert "`'kept8'`, `'host'`" in release


def test_refusals_are_told_in_the_strategys_own_words(generated: dict[Path, str]) -> None:
    page = generated[GENERATED / "optimizer_offload.md"]
    assert "- no weight is trainable, so there is no optimizer state" in page
    assert "| a CPU | on a cpu device the optimizer is in host memory already |" in page


def test_pages_are_written_only_where_they_changed(maker: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "strategies"
    maker.write(folder)
    (folder / "gone.md").write_text("# gone")
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.md")}
    (folder / "packing.md").write_text("old")
    maker.write(folder)
    assert not (folder / "gone.md").exists()
    assert (folder / "packing.md").read_text(encoding="utf-8").startswith("# packing")
    assert (folder / "lora.md").stat().st_mtime_ns == times["lora.md"]


# ---- Chinese pages ----


TWINS = {
    "README": (ENGLISH, CHINESE),
    **{path.stem: (DOCS / path.name, path) for path in sorted((DOCS / "zh").glob("*.md"))},
}


# Chinese readers meet the network first: mirrors stand at the top of these pages.
NETWORK_FIRST = {"installing", "faq"}


def code_of(text: str) -> list[tuple[str, str]]:
    """The blocks of a page, but for what is translated: comments, and what commands print."""

    def told(body: str) -> str:
        return " ".join(sorted(re.findall(r"[\d.,]+ (?:GiB|MiB|GB|ms)", " ".join(body.split()))))

    def same(info: str, body: str) -> str:
        return told(body) if info == "text" else re.sub(r" *#.*", "", body)

    return [
        (one["info"], same(one["info"], one["body"]))
        for one in _FENCE.finditer(text)
        if one["info"] != "{toctree}"
    ]


@pytest.mark.parametrize("name", TWINS)
def test_a_chinese_page_has_the_sections_code_and_figures_of_the_english_one(name: str) -> None:
    english, chinese = (path.read_text(encoding="utf-8") for path in TWINS[name])
    parts = [
        [[len(marks) for marks, _ in _HEADING.findall(_FENCE.sub("", text))], code_of(text)]
        for text in (english, chinese)
    ]
    if name in NETWORK_FIRST:
        parts = [[sorted(part) for part in both] for both in parts]
    assert parts[0] == parts[1]
    figures = [re.findall(r"<!-- figures: ([\w-]+) -->", text) for text in (english, chinese)]
    assert [f"{one}-zh" for one in figures[0]] == figures[1]
    tables = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert tables[0] == tables[1]


def test_the_chinese_readme_links_where_the_english_one_does() -> None:
    english, chinese = (
        [
            link
            for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
            if link.startswith(("docs/", "http")) or link.isupper()
        ]
        for page in (ENGLISH, CHINESE)
    )

    def in_chinese(link: str) -> str:
        path = link.partition("#")[0]
        own = path.replace("docs/", "docs/zh/", 1)
        return own if (ROOT / own).is_file() else path.replace(".svg", ".zh.svg")

    *found, index, licence = chinese
    assert [link.partition("#")[0] for link in found] == [in_chinese(link) for link in english[:-1]]
    assert ["#" in link for link in found] == ["#" in link for link in english[:-1]]
    assert (index, licence) == ("docs/zh/index.md", english[-1])


def test_chinese_is_in_simplified_characters(texts: dict[Path, str]) -> None:
    catalogue = SOURCE / "locale" / "zh_CN" / "LC_MESSAGES" / "memfit.po"
    for page in (catalogue, ROOT / "notebooks" / "tutorial.zh.ipynb", *texts):
        text = texts.get(page) or page.read_text(encoding="utf-8")
        chinese = set(re.findall(r"[\u4e00-\u9fff]", text)) - {"昇"}  # of 昇腾, a maker's name
        assert {one for one in chinese if not one.encode("gb2312", "ignore")} == set(), page


def test_pages_without_a_chinese_twin_are_made_of_docstrings() -> None:
    chinese = {path.name for path in (DOCS / "zh").glob("*.md")}
    assert {path.name for path in DOCS.glob("*.md")} - chinese == {"reference.md"}


QUOTED = [
    (spoken, quote)
    for spoken, page in (("en", DOCS / "faq.md"), ("zh", DOCS / "zh" / "faq.md"))
    for line in re.findall(r"^### (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for quote in re.findall('["“](.+?)["”]', line)
    if not quote.startswith("CUDA")  # torch's own words
]


@pytest.mark.parametrize(("spoken", "quote"), QUOTED)
def test_a_message_a_question_quotes_is_one_that_memfit_says(spoken: str, quote: str) -> None:
    catalogue = SOURCE / "locale" / "zh_CN" / "LC_MESSAGES" / "memfit.po"
    text = catalogue.read_text(encoding="utf-8").casefold()
    mark = "msgid" if spoken == "en" else "msgstr"
    joined = re.sub(r'"\n"', "", text)
    assert any(quote.casefold() in line for line in joined.split("\n\n") if mark in line)


# ---- commands and options that pages name ----


def options_of(command: str) -> set[str]:
    import typer

    from memfit.cli import app
    from memfit.cli.options import FlagCommand
    from memfit.config.training_fields import SHORT_NAMES, training_fields

    found: Any = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    flags = {flag for one in found.params for flag in (*one.opts, *one.secondary_opts)}
    names = (*SHORT_NAMES, *training_fields()) if isinstance(found, FlagCommand) else ()
    fields = {name.replace("_", "-") for name in names}
    return flags | {"--lang", "--help"} | {f"--{no}{one}" for one in fields for no in ("", "no-")}


def test_every_command_and_option_a_page_names_is_there(texts: dict[Path, str]) -> None:
    import typer

    from memfit.cli import app

    root: Any = typer.main.get_command(app)
    known = {name: options_of(name) for name in root.commands}
    anywhere = set().union(*known.values()) | {"--version"}
    wrong, checked = [], 0
    for page, text in texts.items():
        if page.name in ("CHANGELOG.md", "CONTRIBUTING.md") or page.parent == GENERATED:
            continue
        shown = "\n".join(f"\n{one['body']}" for one in _FENCE.finditer(text))
        outside = _FENCE.sub("", text)
        lines = re.findall(r"^(?:\$ )?memfit (.+)$", shown, re.MULTILINE)
        for line in (*lines, *re.findall(r"`memfit ([a-z][^`]*)`", outside)):
            name, *words = line.split()
            flags = {one.partition("=")[0].replace("_", "-") for one in words if one[:2] == "--"}
            checked += 1
            if name not in known or not flags <= known[name]:
                wrong.append(f"{page.relative_to(ROOT)}: memfit {line}")
        for flag in re.findall(r"`(--[a-z][\w-]*)", outside):
            if flag.replace("_", "-") not in anywhere:
                wrong.append(f"{page.relative_to(ROOT)}: {flag}")
    assert wrong == []
    assert checked > 100


def test_chinese_readers_are_sent_to_chinese_pages() -> None:
    translated = {path.name for path in (DOCS / "zh").glob("*.md")}
    readme = CHINESE.read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(docs/(zh/)?([\w-]+\.md)", readme))
    assert {name for folder, name in linked if folder} == translated
    assert not {name for folder, name in linked if not folder} & translated
    for page in (DOCS / "zh").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        away = re.findall(r"\]\(\.\./([\w-]+\.md)", text.replace("[English](../", ""))
        assert not set(away) & translated, page
        assert f"[English](../{page.name}) | 简体中文" in text
        english = (DOCS / page.name).read_text(encoding="utf-8")
        assert f"[简体中文](zh/{page.name})" in english


# ---- the reference ----


def test_public_names_the_reference_does_not_place_are_added(maker: ModuleType) -> None:
    del maker  # its folder is on the path
    public_names = importlib.import_module("public_names")
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    without = page.replace(".. autofunction:: memfit.load\n", "").replace(
        ".. autoclass:: memfit.Budget\n", ""
    )
    added = public_names.completed(without).removeprefix(without)
    assert ".. autofunction:: memfit.load\n" in added
    assert ".. autoclass:: memfit.Budget\n" in added
    assert "finetune" not in added


def is_signature(text: str) -> bool:
    """`memfit.name(parameters)` and nothing else: how the page writes a signature."""
    return re.fullmatch(r"memfit\.[\w.]+\(.*\)\s*", text, re.DOTALL) is not None


SIGNATURES = [
    text.strip() for text in blocks(DOCS / "python-api.md", "python") if is_signature(text)
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

    page = (DOCS / "python-api.md").read_text(encoding="utf-8")
    public = set(memfit.__all__) - {"__version__"}
    assert [name for name in sorted(public) if f"memfit.{name}" not in page] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_on_every_page_is_python(page: Path) -> None:
    for text in blocks(page, "python"):
        if not is_signature(text):
            ast.parse(text)


def test_the_contract_of_a_strategy_is_described_whole() -> None:
    from memfit.strategies import Fidelity

    page = (DOCS / "adding-a-strategy.md").read_text(encoding="utf-8")
    members = [name for name in (*Strategy.__annotations__, *vars(Strategy)) if name[0] != "_"]
    assert len(set(members)) <= 12
    names = {*members, *(item.name for item in Fidelity)}
    assert [name for name in sorted(names) if not re.search(rf"`{name}(?:\(\w*\))?`", page)] == []


# ---- the project's papers ----


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    from memfit._version import __version__

    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (?:\[?)([\w.]+)", changes, re.MULTILINE)
    assert __version__ in newest[:2]
    assert newest[0] in (__version__, "Unreleased")


def test_make_has_every_target_that_pages_and_the_workflow_name(texts: dict[Path, str]) -> None:
    import yaml

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {
        target
        for text in texts.values()
        for words in re.findall(r"(?:^|`)make ((?:[a-z-]+ ?)+)", text, re.MULTILINE)
        for target in words.split()
    }
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    run = {step.removeprefix("make ") for step in steps if step.startswith("make ")}
    assert {"lint", "types", "test"} <= run
    assert (named | run) - targets == set()
    oldest = workflow["jobs"]["test"]["strategy"]["matrix"]["python"][0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={oldest}"


def test_the_formatter_of_commits_is_the_one_of_the_tests() -> None:
    import yaml

    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (ruff,) = (one["rev"] for one in hooks["repos"] if one["repo"].endswith("/ruff-pre-commit"))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nruff=={ruff.removeprefix('v')}\n" in constraints


# ---- versions ----


def test_the_oldest_versions_tested_are_the_oldest_allowed() -> None:
    from packaging.requirements import Requirement
    from packaging.version import Version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    allowed = {
        one.name: Version(next(s.version for s in one.specifier if s.operator == ">="))
        for one in map(Requirement, [*project["dependencies"], *extras["lora"], *extras["report"]])
    }
    lines = (ROOT / "tests" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    compared = {name for name in tested if name in allowed and name != "torch"}
    assert {"transformers", "accelerate", "datasets", "peft"} <= compared
    for name in compared:
        assert Version(tested[name]) == allowed[name], name
