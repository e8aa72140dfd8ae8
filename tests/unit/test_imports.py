"""The package is built as docs/architecture.md says: its tree, and which way imports point."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "memfit"
PAGE = ROOT / "docs" / "architecture.md"
HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft", "sklearn", "numpy", "pandas")
# What a misspelt option, or --help, must not have to wait for.
LIGHT = (
    "memfit", "memfit.errors", "memfit.units", "memfit.i18n", "memfit.printing",
    "memfit.waiting", "memfit.config",
    "memfit.config.files", "memfit.config.training_fields", "memfit.run.signals", "memfit.api",
    "memfit.cli",
)  # fmt: skip
FOR_EVERYBODY = ("_compat", "_version", "locale", "__init__", "__main__")
# package -> what it may ask for when it runs, and not when it is imported
NOT_AT_IMPORT = {
    "strategies": ("datasets",),
    "memory": ("datasets",),
    "engine": ("datasets",),
    "training": ("datasets",),
}


class When(StrEnum):
    """When an import is made."""

    IMPORT = "import"
    RUN = "run"
    TYPES = "types"


@dataclass(frozen=True, slots=True)
class Import:
    """One module another one imports, by its full name."""

    by: str
    module: str
    when: When
    line: int

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.module}"


def is_module(name: str) -> bool:
    path = SOURCE.parent / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports_in(source: str, by: str) -> Iterator[Import]:
    """Every import of a file, with the moment it is made; modules named in strings too."""
    package = ["memfit", *by.removesuffix(".py").split("/")[:-1]]

    def visit(node: ast.AST, when: When) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = When.RUN if when is When.IMPORT else when
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(by, alias.name, when, node.lineno)
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(by, f"{base}.{alias.name}", when, node.lineno)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GROUP":
            return  # of entry points: other packages name it, nothing is imported by it
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value  # importlib.import_module, python -m
            if re.fullmatch(r"memfit(\.\w+)+", name) and is_module(name):
                yield Import(by, name, When.RUN, node.lineno)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, When.TYPES)
            for child in node.orelse:
                yield from visit(child, when)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    yield from visit(ast.parse(source), When.IMPORT)


@functools.cache
def all_imports() -> list[Import]:
    return [
        found
        for path in sorted(SOURCE.rglob("*.py"))
        for found in imports_in(
            path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()
        )
    ]


def blocks() -> tuple[str, str]:
    """The page's tree, and its order."""
    text = PAGE.read_text(encoding="utf-8")
    tree, order = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:2]
    return tree, order


def entries() -> set[str]:
    """What lies at the package's root and is counted."""
    found = {p.name for p in SOURCE.iterdir() if p.suffix == ".py"}
    found |= {p.name + "/" for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    return found - {"__init__.py", "__main__.py", "_version.py", "_compat.py"}


def ranks() -> dict[str, tuple[int, int]]:
    """A package's line, the top one highest, and its place in it."""
    lines = blocks()[1].splitlines()
    known = {name.removesuffix(".py").removesuffix("/") for name in entries()}
    found = {}
    for height, line in enumerate(reversed(lines)):
        words = re.split(r" {2,}", line)
        for place, name in enumerate(word for word in words if word in known):
            found[name] = (height, place)
    return found


def part_of(by: str) -> str:
    """The folder of a file, or the name of one that lies at the top."""
    return by.split("/")[0].removesuffix(".py")


def reaches(module: str, target: str) -> bool:
    return module == target or module.startswith(f"{target}.")


def test_the_reader_tells_when_an_import_is_made() -> None:
    source = (
        "import a\nif TYPE_CHECKING:\n    from b import c\nelse:\n    import d\n"
        "def f():\n    import e.f\n    import_module('memfit.engine.loss')\n"
        "class G:\n    from h import i\n"
        "try:\n    import j\nexcept ImportError:\n    pass\nfrom . import k\nfrom ..l import m\n"
    )
    found = [(item.module, item.when.value) for item in imports_in(source, "x/y/z.py")]
    assert found == [
        ("a", "import"), ("b.c", "types"), ("d", "import"), ("e.f", "run"),
        ("memfit.engine.loss", "run"), ("h.i", "import"), ("j", "import"),
        ("memfit.x.y.k", "import"), ("memfit.x.l.m", "import"),
    ]  # fmt: skip
    assert len(all_imports()) > 300


def test_imports_point_one_way() -> None:
    rank = ranks()
    expected = {name.removesuffix(".py").removesuffix("/") for name in entries()} - {"locale"}
    assert set(rank) == expected
    wrong = []
    for item in all_imports():
        here, parts = part_of(item.by), item.module.split(".")
        target = parts[1] if parts[0] == "memfit" and len(parts) > 1 else ""
        if here in FOR_EVERYBODY or target not in rank or target == here:
            continue
        if rank[target][0] > rank[here][0] or (
            rank[target][0] == rank[here][0] and rank[target][1] > rank[here][1]
        ):
            wrong.append(str(item))
    assert wrong == []


@pytest.mark.parametrize("part", NOT_AT_IMPORT)
def test_what_is_only_asked_for_when_it_runs(part: str) -> None:
    wrong = [
        str(item)
        for item in all_imports()
        if part_of(item.by) == part
        and item.when is When.IMPORT
        and any(reaches(item.module, later) for later in NOT_AT_IMPORT[part])
    ]
    assert wrong == []


def names_in(source: str) -> set[str]:
    """What other modules may import from a module: all that its outermost lines name."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        for part in [node] if isinstance(node, ast.ClassDef | ast.FunctionDef) else ast.walk(node):
            if isinstance(part, ast.ClassDef | ast.FunctionDef):
                found.add(part.name)
            elif isinstance(part, ast.Name):
                found.add(part.id)
            elif isinstance(part, ast.alias):
                found.add((part.asname or part.name).partition(".")[0])
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.add(part.value)  # of `__all__`, for names that are made when asked for
    return found


@pytest.mark.parametrize("folder", ["tests/gpu", "benchmarks", "examples", "scripts"])
def test_what_the_suite_does_not_run_imports_what_is_there(folder: str) -> None:
    missing = []
    for file in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not is_module(node.module or ""):
                continue
            module = SOURCE.parent / (node.module or "").replace(".", "/")
            source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            there = names_in(source.read_text(encoding="utf-8"))
            missing += [
                f"{file.name}: {node.module}.{one.name}"
                for one in node.names
                if one.name not in there and not is_module(f"{node.module}.{one.name}")
            ]
    assert missing == []


def test_the_page_names_each_entry_of_the_root() -> None:
    tree = {line.split()[0] for line in blocks()[0].splitlines()[1:]}
    assert tree == entries()


def test_no_two_modules_have_one_name() -> None:
    """But for the commands, which are called what a person types."""
    paths = (path for path in SOURCE.rglob("*.py") if path.parent.name != "cli")
    names = Counter(path.stem for path in paths if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_every_package_says_its_job_and_what_others_import() -> None:
    short = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("__init__.py")
        if path.parent.name != "locale"
        and len((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split()) < 8
    ]
    assert short == []


def test_what_the_command_line_starts_with_imports_nothing_heavy() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = sorted(set(sys.modules) & set({HEAVY!r}))\n"
        "    assert not found, f'{name} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
