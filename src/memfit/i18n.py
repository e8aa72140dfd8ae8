"""Sentences for people, in their language.

    from memfit.i18n import N_, Message, nt, pt, t

    t("budget {bytes}", bytes="4 GB")             # budget 4 GB, or 预算 4 GB in Chinese
    pt("heading", "Memory")                       # with a context, where one English text has two
                                                  # Chinese ones
    nt("{count} layer", "{count} layers", 3)      # singular or plural
    N_("activations")                             # marks a text that `t` gets later, from a table
    Message("only {kind} is fused", kind="GELU")  # English now, translated when it is shown

The English sentence is the key, so all of these take a literal, and `make messages` finds it there
(tests/unit/test_messages.py fails if memfit.po lacks a sentence or has one too many). Fields in
braces are `str.format`'s and the same in both languages. Translate whole sentences: word order
differs between languages. Text from data goes in as a field; whoever shows the sentence makes it
safe (printing.py).

The language is the first of: what `speaking` or `set_language` was given (the command line's
`--lang en|zh`), the variable MEMFIT_LANG, the locale (zh_CN, zh_TW, zh_HK ... mean Chinese). A
sentence without a translation is shown in English. A new thread does not inherit the language:
pass `language()` to it and use `speaking` there.

memfit.mo is compiled from memfit.po when the package is built. In a checkout it is compiled at the
first Chinese sentence, if Babel is installed.
"""

from __future__ import annotations

import functools
import gettext
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

Language = Literal["en", "zh"]

LANGUAGES: tuple[Language, ...] = ("en", "zh")

ENVIRONMENT = "MEMFIT_LANG"

CATALOGUE = Path(__file__).parent / "locale" / "zh_CN" / "LC_MESSAGES" / "memfit.po"
"""The Chinese sentences."""

_chosen: ContextVar[Language | None] = ContextVar("memfit_language", default=None)

# Primary language identifier of Windows' LANGIDs, whatever the region.
_WINDOWS_CHINESE = 0x04

# gettext's own separator of a context and its sentence.
_CONTEXT_END = "\x04"


def t(message: str, /, **values: Any) -> str:
    """Returns the sentence in the current language, its fields filled in."""
    return translate(message, values)


def pt(context: str, message: str, /, **values: Any) -> str:
    """Returns what `t` does, for a sentence whose translation depends on the context."""
    return translate(NP_(context, message), values)


def nt(one: str, several: str, count: int, /, **values: Any) -> str:
    """Returns the singular or the plural sentence; both may use the field `count`."""
    if language() == "en":
        template = one if count == 1 else several
    else:
        template = _chinese().ngettext(one, several, count)
    return _filled(template, {"count": count, **values}, None)


def N_(message: str, /) -> str:  # noqa: N802
    """Marks a literal for extraction; `t` translates it later."""
    return message


def NP_(context: str, message: str, /) -> str:  # noqa: N802
    """Marks a literal with its context; `t` translates it later."""
    return f"{context}{_CONTEXT_END}{message}"


def translate(message: str, values: Mapping[str, Any], spoken: Language | None = None) -> str:
    """Returns the sentence in that language, or the current one."""
    return _filled(template_of(message, spoken), values, spoken)


def template_of(message: str, spoken: Language | None = None) -> str:
    """Returns the sentence with its fields in braces; in English if it has no translation."""
    if message and (spoken or language()) != "en":  # the empty message is the catalogue's header
        found = _chinese().gettext(message)
        if found is not message:
            return found
    return message.partition(_CONTEXT_END)[2] or message


class Message(str):
    """A sentence that is English text everywhere, and translated when it is shown.

    Reasons and refusals are compared, joined and logged as English, and kept in files. `shown`
    gives them in the reader's language. Values may be messages themselves.
    """

    text: str
    """The English sentence with its fields in braces, which is the key of its translation."""
    values: Mapping[str, Any]

    def __new__(cls, text: str, /, **values: Any) -> Message:
        """Fills in the English sentence."""
        made = super().__new__(cls, translate(text, values, "en"))
        made.text, made.values = text, values
        return made

    def shown(self, spoken: Language | None = None) -> str:
        """Returns the sentence in that language, or the current one."""
        return translate(self.text, self.values, spoken)

    def __reduce__(self) -> Any:
        """Pickles and copies it by its parts."""
        return message_of, (self.as_json(),)

    def as_json(self) -> dict[str, Any]:
        """Returns what `message_of` reads."""
        values = {
            name: value.as_json() if isinstance(value, Message) else value
            for name, value in self.values.items()
        }
        return {"text": self.text, "values": values}


def message_of(stored: Any) -> str:
    """Returns a message from what `as_json` returned, and plain text as it is."""
    if not isinstance(stored, Mapping):
        return str(stored)
    values = {
        name: message_of(value) if isinstance(value, Mapping) else value
        for name, value in stored["values"].items()
    }
    return Message(stored["text"], **values)


def shown(text: object, spoken: Language | None = None) -> str:
    """Returns a message or a sentence of the catalogue in the current language, others as is."""
    if isinstance(text, Message):
        return text.shown(spoken)
    return template_of(str(text), spoken)


class _Fields(dict[str, Any]):
    """Leaves a field without a value as it is written: no sentence about a failure fails itself."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


def _filled(template: str, values: Mapping[str, Any], spoken: Language | None) -> str:
    said = {
        name: value.shown(spoken) if isinstance(value, Message) else value
        for name, value in values.items()
    }
    return template.format_map(_Fields(said))


# ---- the catalogue ----


@functools.cache
def _chinese() -> gettext.NullTranslations:
    """Returns the compiled catalogue, compiled again if memfit.po changed; an empty one if none.

    An installed memfit has no memfit.po.
    """
    compiled = CATALOGUE.with_suffix(".mo")
    with suppress(ImportError, OSError):
        changed = CATALOGUE.stat().st_mtime_ns
        if not compiled.exists() or changed > compiled.stat().st_mtime_ns:
            _compile(compiled)
    try:
        with compiled.open("rb") as file:
            return gettext.GNUTranslations(file)
    except OSError:
        return gettext.NullTranslations()


def _compile(compiled: Path) -> None:
    from babel.messages.mofile import write_mo
    from babel.messages.pofile import read_po

    with CATALOGUE.open("rb") as file:
        catalogue = read_po(file)
    unfinished = compiled.with_name(f"{compiled.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            write_mo(file, catalogue)
        unfinished.replace(compiled)
    finally:
        unfinished.unlink(missing_ok=True)


# ---- which language ----


def language() -> Language:
    """The language spoken here."""
    return _chosen.get() or _from_environment()


def chosen_language() -> Language | None:
    """The language asked for by --lang or `set_language`; None where the environment decides."""
    return _chosen.get()


def set_language(spoken: str | None) -> None:
    """Speak it from now on; None goes back to the environment's."""
    _chosen.set(checked(spoken) if spoken is not None else None)


@contextmanager
def speaking(spoken: str | None) -> Iterator[None]:
    """Speak it for as long as the block lasts; None changes nothing."""
    if spoken is None:
        yield
        return
    token = _chosen.set(checked(spoken))
    try:
        yield
    finally:
        _chosen.reset(token)


def checked(spoken: str) -> Language:
    """A language memfit has, from en, zh, zh-CN, zh_TW.UTF-8 and the like; else ValueError."""
    found = _known(spoken)
    if found is None:
        # No error of memfit's own: those are translated, so they import this module.
        raise ValueError(
            t("there is no language {name} here; write --lang en or --lang zh", name=repr(spoken))
        )
    return found


def _known(spoken: str) -> Language | None:
    name = spoken.strip().lower().replace("-", "_").partition(".")[0].partition("_")[0]
    return next((one for one in LANGUAGES if one == name), None)


def _from_environment() -> Language:
    """The language of MEMFIT_LANG, or of the locale for messages, as gettext finds it."""
    asked = os.environ.get(ENVIRONMENT, "").strip()
    if asked:
        return _known(asked) or "en"  # a variable set long ago must not break every command
    names = ("LC_ALL", "LC_MESSAGES", "LANG")
    locale = next((value for name in names if (value := os.environ.get(name))), "")
    if locale.partition(".")[0] not in ("", "C", "POSIX"):
        locale = os.environ.get("LANGUAGE", "").partition(":")[0] or locale
    elif not locale and sys.platform == "win32":
        import ctypes

        identifier = int(ctypes.windll.kernel32.GetUserDefaultUILanguage())
        return "zh" if identifier & 0x3FF == _WINDOWS_CHINESE else "en"
    return "zh" if locale.lower().startswith("zh") else "en"
