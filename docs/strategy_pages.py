"""A page for every strategy, written from its class when the site is built.

A Sphinx extension: what a page says is said in the strategy's own file and nowhere else.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import string
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from memfit.doctor.environment import look_around
from memfit.doctor.reach import as_used, readiness
from memfit.memory.cards import find_card
from memfit.strategies import ORDER, Fidelity, Strategy

# A card of each generation whose abilities differ, and what readers know it by.
CARDS = {"T4": "Turing", "RTX 3060": "Ampere", "H200": "Hopper"}
_WIDTH = 88
_MEANING = {
    Fidelity.EXACT: "the same numbers up to rounding of the same precision",
    Fidelity.ROUNDING: "the same algorithm with fewer bits",
    Fidelity.OPTIMIZER: "another update rule; only with `--allow optimizer`",
    Fidelity.CAPACITY: "fewer weights are trained; only with `--allow lora` or `--allow freeze`",
    Fidelity.DATA: "texts are cut shorter; only with `--allow truncate`",
}


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "strategies"))
    return {"parallel_read_safe": True}


def write(folder: Path) -> None:
    """Every page, as far as it changed; pages of strategies that are gone go."""
    folder.mkdir(exist_ok=True)
    made = pages()
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Text by file name: one a strategy, and the list of all."""
    ready = _where_ready()
    return {
        "index.md": _index(),
        **{f"{kind.name}.md": _page(kind, ready[kind.name]) for kind in ORDER},
    }


def _index() -> str:
    rows = [
        (f"[{kind.name}]({kind.name}.md)", ", ".join(kind.shrinks), str(_plain(kind).fidelity),
         kind.reason)
        for kind in ORDER
    ]  # fmt: skip
    names = "\n".join(kind.name for kind in ORDER)
    return (
        "# Strategies\n\n"
        "Memory techniques, each in one file of `src/memfit/strategies/`, in the order they are "
        "applied. The plan chooses among them; `BudgetTrainer(strategies=[...])` takes yours.\n\n"
        f"{_table(('strategy', 'shrinks', 'fidelity', 'why'), rows)}\n"
        f"{_fidelities()}\n"
        f"```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    )


def _fidelities() -> str:
    rows = [(f"`{one}`", _MEANING[one]) for one in Fidelity]
    return f"## Fidelity\n\n{_table(('', 'what it does to the result'), rows)}"


def _page(kind: type[Strategy], where: list[tuple[str, str]]) -> str:
    parts = [
        f"# {kind.name}",
        f"{_sentence(kind.reason)}",
        _facts(kind),
        "## What it does",
        inspect.getdoc(sys.modules[kind.__module__]) or "",
        "## Settings",
        _settings(kind),
        "## Using it",
        _example(kind),
        "## Where it can be used",
        _table(("device", ""), where),
        _refusals(kind),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _facts(kind: type[Strategy]) -> str:
    least = _plain(kind).fidelity
    others = "; ".join(f"`{one}` with {how}" for one, how in _other_fidelities(kind))
    fidelity = f"`{least}`: {_MEANING[least]}" + (f"; {others}" if others else "")
    beside = sorted(
        one.name for one in ORDER if one.name in kind.conflicts or kind.name in one.conflicts
    )
    rows = [
        ("shrinks", ", ".join(kind.shrinks)),
        ("fidelity", fidelity),
        ("cannot stand beside", ", ".join(f"[{one}]({one}.md)" for one in beside) or "–"),
        ("applied", f"{ORDER.index(kind) + 1} of {len(ORDER)}"),
        ("file", f"`src/{kind.__module__.replace('.', '/')}.py`"),
    ]
    return _table(("", ""), rows)


def _other_fidelities(kind: type[Strategy]) -> Iterator[tuple[Fidelity, str]]:
    """Settings that change what a strategy does to the result, one change at a time."""
    plain = _plain(kind)
    for name, choices in _choices(kind).items():
        for value in choices:
            try:
                changed = dataclasses.replace(plain, **{name: value})  # type: ignore[type-var]
            except ValueError:
                continue
            if changed.fidelity is not plain.fidelity:
                yield changed.fidelity, f"`{name}={value!r}`"


def _choices(kind: type[Strategy]) -> dict[str, list[Any]]:
    """The values a setting is chosen from, where that can be listed."""
    hints = typing.get_type_hints(kind)
    found: dict[str, list[Any]] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        members = [hint, *get_args(hint)] if get_origin(hint) is not Literal else [hint]
        values: Iterator[Any] = itertools.chain.from_iterable(
            get_args(one) if get_origin(one) is Literal else (False, True) if one is bool else ()
            for one in members
        )
        found[field.name] = list(values)
    return found


def _settings(kind: type[Strategy]) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    said = _field_docstrings(tree.body[0])
    hints, choices = inspect.get_annotations(kind), _choices(kind)
    rows = [
        (
            f"`{field.name}`",
            ", ".join(f"`{one!r}`" for one in choices[field.name]) or _code(hints[field.name]),
            f"`{field.default!r}`",
            said.get(field.name, ""),
        )
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    ]
    about = inspect.getdoc(kind) or ""
    if not rows:
        return f"{about}\n\nIt has none."
    return f"{about}\n\n{_table(('setting', 'values', 'default', ''), rows)}"


def _field_docstrings(body: ast.AST) -> dict[str, str]:
    """The strings that stand below fields."""
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[ast.unparse(field.target)] = " ".join(value.value.split())
    return found


def _example(kind: type[Strategy]) -> str:
    """With what it stands on."""
    used = as_used(kind, "bfloat16")
    names = ", ".join(sorted(type(one).__name__ for one in used))
    calls = ", ".join(map(_call, used))
    line = f"trainer = BudgetTrainer(model, args, train_dataset=rows, strategies=[{calls}])"
    if len(line) > _WIDTH:
        listed = "".join(f"    {_call(one)},\n" for one in used)
        line = (
            f"strategies = [\n{listed}]\n"
            "trainer = BudgetTrainer(model, args, train_dataset=rows, strategies=strategies)"
        )
    return (
        "```python\n"
        "from memfit import BudgetTrainer\n"
        f"from memfit.strategies import {names}\n\n"
        f"{line}\n"
        "```"
    )


def _call(strategy: Strategy) -> str:
    """As one writes it: settings that are not the default."""
    changed = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(strategy)  # type: ignore[arg-type]
        if (value := getattr(strategy, field.name)) != field.default
    ]
    return f"{type(strategy).__name__}({', '.join(changed)})"


def _where_ready() -> dict[str, list[tuple[str, str]]]:
    """For each strategy what it says of a CPU and of some cards."""
    here = look_around()
    blind = dataclasses.replace(here, torch=dataclasses.replace(here.torch, sees_gpu=False))
    asked = {"a CPU": readiness(blind)} | {
        f"{name} ({kind})": readiness(here, find_card(name)) for name, kind in CARDS.items()
    }
    found: dict[str, list[tuple[str, str]]] = {kind.name: [] for kind in ORDER}
    for device, ready in asked.items():
        for one in ready:
            found[one.strategy].append((device, _words(one.reason) if one.reason else "works"))
    return found


def _refusals(kind: type[Strategy]) -> str:
    """Every sentence it can refuse with, out of its own code."""
    found = list(dict.fromkeys(_returned_sentences(kind)))
    if not found:
        return ""
    lines = "\n".join(f"- {_words(one)}" for one in found)
    return f"What it says where it has no use:\n\n{lines}"


def _returned_sentences(kind: type[Strategy]) -> Iterator[str]:
    """What `unavailable` returns, itself and through what it calls in its own file."""
    module = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    functions = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    todo, seen = ["unavailable"], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from _texts(node.value)
            if isinstance(node, ast.Call):
                called = node.func
                todo.append(
                    called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
                )


def _texts(value: ast.expr) -> Iterator[str]:
    """Sentences in a returned expression; what is filled in is shown as a dash."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and " " in value.value:
        yield value.value
    elif isinstance(value, ast.Call) and ast.unparse(value.func) == "Message":
        pieces = [
            piece + ("" if field is None else "…")
            for text in value.args
            if isinstance(text, ast.Constant)
            for piece, field, _, _ in string.Formatter().parse(str(text.value))
        ]
        if any(" " in piece.strip("… ") for piece in pieces):
            yield "".join(pieces)
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif isinstance(value, ast.BoolOp):
        for one in value.values:
            yield from _texts(one)


def _plain(kind: type[Strategy]) -> Strategy:
    return kind()


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _code(annotation: str) -> str:
    return f"`{annotation}`".replace("|", "\\|")


def _words(text: str) -> str:
    """A sentence of the code as Markdown: nothing in it is markup."""
    return text.replace("*", "\\*").replace("_", "\\_").replace("|", "\\|").replace("<", "&lt;")


def _table(heads: tuple[str, ...], rows: list[Any]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
