"""What memfit says, in English and in Chinese: the one way from an id to a sentence.

    from memfit.messages import t

    t("report.memory.title")                       # Memory, or 显存 where Chinese is spoken
    t("report.bar.over", over="0.2 GiB", budget="4.00 GB")

The language is, in this order: what `speaking` or `set_language` was told (the command line's
`--lang en|zh`), the variable MEMFIT_LANG, the locale (zh_CN, zh_TW, zh_HK ... speak Chinese).
English stands in where a sentence has no Chinese.

A catalogue is a module with plain dictionaries, beside the code that speaks:

    MESSAGES = {"memory.title": {"en": "Memory", "zh": "显存"}, ...}

Adding one takes a line in CATALOGUES below, under the first word of its ids; it is imported when
the first of its ids is asked for, so that `--help` waits for none. Fields in braces are
`str.format`'s and the same in both languages (tests/unit/test_messages.py holds every catalogue
to it). A sentence is a whole one: never glued from words, since their order differs. Text from
data goes in as a field and is made safe (safe_text.py) by whoever shows the sentence.

A thread begins without its parent's language: hand `language()` over and use `speaking` there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from memfit.errors import ConfigError

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
ENVIRONMENT = "MEMFIT_LANG"

CATALOGUES: dict[str, str] = {
    "card": "memfit.hub.card_messages",
    "cli": "memfit.cli.messages",
    "data": "memfit.data.messages",
    "doctor": "memfit.doctor.messages",
    "hub": "memfit.hub.messages",
    "error": "memfit.error_messages",
    "input": "memfit.input_messages",
    "live": "memfit.runtime.messages",
    "run": "memfit.run_messages",
    "shown": "memfit.report.terminal_messages",
    "ladder": "memfit.climbing.messages",
    "plan": "memfit.planner.messages",
    "planned": "memfit.plan_messages",
    "reason": "memfit.reasons",
    "report": "memfit.report.messages",
}
"""The first word of an id -> the module whose MESSAGES it is looked up in."""

_chosen: ContextVar[Language | None] = ContextVar("memfit_language", default=None)
# Primary language identifier of Windows' LANGIDs, whatever the region.
_WINDOWS_CHINESE = 0x04


def t(message: str, /, **fields: Any) -> str:
    """The sentence of that id in the language spoken here, its fields filled in."""
    return say(message, fields)


def say(message: str, fields: Mapping[str, Any], spoken: Language | None = None) -> str:
    """The same, in a language of the caller's choice."""
    by_language = lookup(message)
    template = by_language.get(spoken or language()) or by_language["en"]
    return template.format_map(_Fields(fields))


def has(message: str) -> bool:
    """Whether there is such a sentence: names from data may have one, or stay as they are."""
    catalogue, _, name = message.partition(".")
    return catalogue in CATALOGUES and name in _messages(catalogue)


def lookup(message: str) -> Mapping[Language, str]:
    """A sentence in all its languages."""
    catalogue, _, name = message.partition(".")
    if catalogue not in CATALOGUES:
        raise KeyError(f"no catalogue {catalogue!r}; known are {', '.join(CATALOGUES)}")
    return _messages(catalogue)[name]


def _messages(catalogue: str) -> Mapping[str, Mapping[Language, str]]:
    module = importlib.import_module(CATALOGUES[catalogue])
    found: Mapping[str, Mapping[Language, str]] = module.MESSAGES
    return found


class _Fields(dict[str, Any]):
    """A field nobody gave shows as it is written: no sentence about a failure fails itself."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"


# ---- which language ----


def language() -> Language:
    """The language spoken here."""
    return _chosen.get() or _from_environment()


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
    """A language memfit has, from en, zh, zh-CN, zh_TW.UTF-8 and the like."""
    found = _known(spoken)
    if found is None:
        raise ConfigError(t("cli.lang.none", name=repr(spoken)))
    return found


def _known(spoken: str) -> Language | None:
    name = spoken.strip().lower().replace("-", "_").partition(".")[0].partition("_")[0]
    return next((one for one in LANGUAGES if one == name), None)


def _from_environment() -> Language:
    asked = os.environ.get(ENVIRONMENT, "").strip()
    if asked:
        return _known(asked) or "en"  # a variable set long ago must not break every command
    return "zh" if _locale().lower().startswith("zh") else "en"


def _locale() -> str:
    """The locale for messages, as gettext finds it."""
    names = ("LC_ALL", "LC_MESSAGES", "LANG")
    found = next((value for name in names if (value := os.environ.get(name))), "")
    if found.partition(".")[0] not in ("", "C", "POSIX"):
        return os.environ.get("LANGUAGE", "").partition(":")[0] or found
    if not found and sys.platform == "win32":
        import ctypes

        identifier = int(ctypes.windll.kernel32.GetUserDefaultUILanguage())
        return "zh" if identifier & 0x3FF == _WINDOWS_CHINESE else ""
    return ""
