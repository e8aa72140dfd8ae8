"""Imports point one way: each part of memfit knows only what lies below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "memfit"
HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft", "sklearn", "numpy", "pandas")
# What a misspelt option, or --help, must not have to wait for.
LIGHT = (
    "memfit", "memfit.errors", "memfit.units", "memfit.toml", "memfit.files", "memfit.config",
    "memfit.training_fields", "memfit.api", "memfit.cli",
)  # fmt: skip
# part -> what it never imports, not even inside a function
NEVER = {
    "data": ("runtime", "strategies", "planner"),
    "evaluation": ("runtime", "strategies", "planner"),
    "report": ("runtime", "strategies", "planner"),
    "packing": ("runtime", "strategies", "planner"),
    "optim": ("runtime", "strategies", "planner"),
    "fused": ("runtime", "strategies", "planner"),
    "memory": ("runtime", "strategies", "planner"),
    "strategies": ("planner",),
}
# part -> what it may ask for when it runs, and not when it is imported
NOT_AT_IMPORT = {
    # A strategy that runs steps in another way hands the Trainer an executor of runtime/.
    "strategies": ("memfit.runtime", "datasets"),
    "memory": ("datasets",),
    "runtime": ("datasets",),
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


def imports_in(source: str, by: str) -> Iterator[Import]:
    """Every import statement of a file, with the moment it is made."""

    def visit(node: ast.AST, when: When) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = When.RUN if when is When.IMPORT else when
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(by, alias.name, when, node.lineno)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{by}: imports are written in full"
            for alias in node.names:
                yield Import(by, f"{node.module}.{alias.name}", when, node.lineno)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, When.TYPES)
            for child in node.orelse:
                yield from visit(child, when)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    yield from visit(ast.parse(source), When.IMPORT)


def all_imports() -> list[Import]:
    return [
        found
        for path in sorted(SOURCE.rglob("*.py"))
        for found in imports_in(
            path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()
        )
    ]


IMPORTS = all_imports()


def part_of(by: str) -> str:
    """The folder of a file, or the name of one that lies at the top."""
    return by.split("/")[0].removesuffix(".py")


def reaches(module: str, target: str) -> bool:
    return module == target or module.startswith(f"{target}.")


def test_the_reader_tells_when_an_import_is_made() -> None:
    source = (
        "import a\nif TYPE_CHECKING:\n    from b import c\nelse:\n    import d\n"
        "def f():\n    import e.f\nclass G:\n    from h import i\n"
        "try:\n    import j\nexcept ImportError:\n    pass\n"
    )
    found = [(item.module, item.when.value) for item in imports_in(source, "x.py")]
    assert found == [
        ("a", "import"), ("b.c", "types"), ("d", "import"), ("e.f", "run"), ("h.i", "import"),
        ("j", "import"),
    ]  # fmt: skip
    assert len(IMPORTS) > 300


@pytest.mark.parametrize("part", NEVER)
def test_a_part_knows_nothing_of_what_lies_above_it(part: str) -> None:
    assert any(part_of(item.by) == part for item in IMPORTS)
    wrong = [
        str(item)
        for item in IMPORTS
        if part_of(item.by) == part
        and item.when is not When.TYPES
        and any(reaches(item.module, f"memfit.{above}") for above in NEVER[part])
    ]
    assert wrong == []


@pytest.mark.parametrize("part", NOT_AT_IMPORT)
def test_what_is_only_asked_for_when_it_runs(part: str) -> None:
    wrong = [
        str(item)
        for item in IMPORTS
        if part_of(item.by) == part
        and item.when is When.IMPORT
        and any(reaches(item.module, later) for later in NOT_AT_IMPORT[part])
    ]
    assert wrong == []


def test_folders_do_not_import_each_other_in_circles() -> None:
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    graph: dict[str, set[str]] = {folder: set() for folder in folders}
    for item in IMPORTS:
        target = item.module.split(".")[1] if item.module.startswith("memfit.") else ""
        here = part_of(item.by)
        if item.when is When.IMPORT and {here, target} <= folders and here != target:
            graph[here].add(target)
    assert graph["planner"]
    assert graph["runtime"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' -> '.join(error.args[1])}")


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
