"""Extracts the sentences of memfit and updates the Chinese catalogue with them.

    make messages

writes every sentence that the code says into src/memfit/locale/zh_CN/LC_MESSAGES/memfit.po, keeps
the translations that are there, removes sentences nobody says, and lists those without Chinese.
tests/unit/test_messages.py checks the catalogue against the same extraction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po, write_po

from memfit import errors

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "memfit"
CATALOGUE = SOURCE / "locale" / "zh_CN" / "LC_MESSAGES" / "memfit.po"
# Which arguments of memfit.i18n's functions are extracted; "c" is the context.
KEYWORDS: dict[str, Any] = {
    "t": (1,),
    "N_": (1,),
    "Message": (1,),
    "pt": ((1, "c"), 2),
    "NP_": ((1, "c"), 2),
    "nt": (1, 2),
    **{
        name: (1,)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MemfitError)
    },
}
METHODS = [("**.py", "python"), ("**.html", "jinja2"), ("**.md", "jinja2")]
_HEADER = """\
# Chinese sentences of memfit, by the English ones in the code.
# `make messages` adds new sentences; fill in their msgstr.
"""


# Dates and versions would make every update a change.
_IDLE_HEADERS = re.compile(
    r'^"(POT-Creation-Date|PO-Revision-Date|Generated-By|Last-Translator|Language-Team'
    r"|Report-Msgid-Bugs-To|Project-Id-Version).*\n",
    re.MULTILINE,
)


def extracted() -> Catalog:
    """Returns all sentences of the code, the templates and the command line's help."""
    found = Catalog(locale="zh_CN", charset="utf-8", header_comment=_HEADER, fuzzy=False)
    for path, _, message, _, context in extract_from_dir(
        SOURCE,
        METHODS,
        keywords=KEYWORDS,
        options_map={name: {"silent": "false"} for name in ("**.html", "**.md")},
    ):
        found.add(message, locations=[(f"src/memfit/{Path(path).as_posix()}", 0)], context=context)
    for text in help_texts():
        found.add(text, locations=[("src/memfit/cli", 0)])
    return found


def help_texts() -> Iterator[str]:
    """Returns every text of the command line's help, without the defaults of its options."""
    import typer

    from memfit.cli import app
    from memfit.cli.options import without_default

    root: Any = typer.main.get_command(app)
    texts = {"Show this message and exit."}  # typer's own, of --help
    for command in (root, *root.commands.values()):
        texts |= {command.help, command.epilog, *(getattr(p, "help", "") for p in command.params)}
    yield from sorted(without_default(text) for text in texts if text)


def kept() -> Catalog:
    """Returns the catalogue as it is."""
    with CATALOGUE.open("rb") as file:
        return read_po(file, locale="zh_CN")


def main() -> int:
    """Updates memfit.po; the exit code is 1 if a sentence has no Chinese."""
    made, before = extracted(), kept()
    for message in made:
        old = before.get(message.id, context=message.context) if message.id else None
        if old is not None and "fuzzy" not in old.flags:
            message.string = old.string
    with CATALOGUE.open("wb") as file:
        write_po(file, made, width=100, include_lineno=False, sort_output=False)
    text = CATALOGUE.read_text(encoding="utf-8")
    CATALOGUE.write_text(_IDLE_HEADERS.sub("", text), encoding="utf-8")
    missing = [message.id for message in made if message.id and not message.string]
    for one in missing:
        print(f"no Chinese yet: {one!r}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
