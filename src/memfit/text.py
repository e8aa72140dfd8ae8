"""Text for people: translated, safe to print, wrapped by width, and said while they wait.

from memfit.text import N_, Message, nt, pt, t

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
safe (text.py).

The language is the first of: what `speaking` or `set_language` was given (the command line's
`--lang en|zh`), the variable MEMFIT_LANG, the locale (zh_CN, zh_TW, zh_HK ... mean Chinese). A
sentence without a translation is shown in English. A new thread does not inherit the language:
pass `language()` to it and use `speaking` there.

memfit.mo is compiled from memfit.po when the package is built. In a checkout it is compiled at the
first Chinese sentence, if Babel is installed.

File names, column names, labels and texts come from anywhere. Everything a command prints goes
through `printable`, everything it writes about itself through `without_tokens`.

Chinese has no spaces, so a line may end after any of its characters, but none begins with a
closing mark or ends with an opening one. Rich knows the widths; it is imported when a text is
measured, since help in English measures none.

with telling(quiet=quiet):              # once a command, before anything heavy is imported
        with doing(t("planning …")):          # around each piece of work, wherever it is done
            ...

A thread shows the innermost piece of work: at a terminal on a line with a spinner and the seconds;
in a pipe or a file as a plain line, followed by dots. Work that counts its rows (`show_count`)
shows a bar and rows a second; in a pipe it adds a line every two seconds. Work that is
over at once is not mentioned. Outside of `telling`, `doing` does nothing. Whatever prints to
stderr meanwhile calls `make_way()` first.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gettext
import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from memfit.errors import ConfigError, speak_with

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.spinner import Spinner

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
    if (spoken or language()) != "en":
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
    """Returns a message in the current language, and any other text as it is."""
    return text.shown(spoken) if isinstance(text, Message) else str(text)


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
    """Returns the compiled catalogue; an empty one if it cannot be had."""
    compiled = CATALOGUE.with_suffix(".mo")
    if _is_newer(CATALOGUE, compiled):
        with suppress(ImportError, OSError):
            _compile(compiled)
    try:
        with compiled.open("rb") as file:
            return gettext.GNUTranslations(file)
    except OSError:
        return gettext.NullTranslations()


def add_catalogue(compiled: Path) -> None:
    """Adds another package's Chinese sentences; those memfit has itself stay."""
    with compiled.open("rb") as file:
        _chinese().add_fallback(gettext.GNUTranslations(file))


def _is_newer(source: Path, compiled: Path) -> bool:
    """Returns whether memfit.po has changed since it was compiled; an installed memfit has none."""
    try:
        changed = source.stat().st_mtime_ns
    except OSError:
        return False
    try:
        return changed > compiled.stat().st_mtime_ns
    except OSError:
        return True


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
    """A language memfit has, from en, zh, zh-CN, zh_TW.UTF-8 and the like."""
    found = _known(spoken)
    if found is None:
        raise ConfigError(
            t("there is no language {name} here; write --lang en or --lang zh", name=repr(spoken))
        )
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


# Characters that turn text around or hide it: a terminal is not the place to find out.
_BIDI = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)}

_ACTING = ("Cc", "Zl", "Zp", "Cs")

_TOKENS = (
    re.compile(r"\b(hf_|api_org_)[A-Za-z0-9]{16,}"),
    re.compile(r"\b(ms-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"),
    re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)"),
)

_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN", "WANDB_API_KEY")

_SHORTEST_TOKEN = 8

_FAILING = ("strict", "backslashreplace")

_STAND_INS = dict(zip("→↓…–—·²│┃━█▓▒░▚▞▤", ">v.--.2||-#%+:/\\=", strict=True))


def encodable(stream: Any) -> None:
    """From here on a character the stream cannot hold becomes a plain one, never an error."""
    if getattr(stream, "errors", "") in _FAILING and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="memfit")


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """An old console lacks arrows and Chinese: as many plain characters take their place."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(char, "?") for char in lacking), error.end


codecs.register_error("memfit", _stand_in)


def clean(text: object) -> str:
    """On one line: control and direction characters become spaces."""
    return "".join(" " if _acts(char) else char for char in str(text))


def printable(text: object) -> str:
    """Cleans a text like `clean`, but keeps its lines, and removes tokens."""
    return without_tokens("\n".join(clean(line) for line in str(text).split("\n")))


def without_tokens(text: str) -> str:
    """Access tokens, by their form or because the environment holds them, become dots."""
    for name in _TOKEN_VARIABLES:
        token = os.environ.get(name, "")
        if len(token) >= _SHORTEST_TOKEN:
            text = text.replace(token, "…")
    for form in _TOKENS:
        text = form.sub(r"\1…", text)
    return text


def escaped_json(text: str) -> str:
    """JSON whose strings hold no character that acts: written as JSON's own escapes."""
    return "".join(f"\\u{ord(char):04x}" if char != "\n" and _acts(char) else char for char in text)


def _acts(char: str) -> bool:
    # Most text is ASCII; asking for the category of each letter would take ten times as long.
    if " " <= char <= "~":
        return False
    return char in _BIDI or unicodedata.category(char) in _ACTING


_NOT_FIRST = "，。；：、！？）》」』”’…"

_NOT_LAST = "（《「『“‘"

# A run of spaces; a wide character with the marks that belong to it; a word of narrow ones.
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6"
)

_UNIT = re.compile(rf"\s+|[{_NOT_LAST}]*(?:[{_WIDE}]|[^\s{_WIDE}]+)[{_NOT_FIRST}]*")


def cells(text: str) -> int:
    """Returns how many columns a text takes in a terminal."""
    from rich.cells import cell_len

    return cell_len(text)


def wrap(text: str, width: int) -> list[str]:
    """Returns the text in lines of at most `width` cells; only a word wider than that is cut."""
    from rich.cells import chop_cells

    width = max(width, 1)
    lines, line = list[str](), ""
    for unit in _UNIT.findall(text):
        if cells(line + unit.rstrip()) <= width:
            line += unit
            continue
        if line.strip():
            lines.append(line.rstrip())
        *full, line = [part for part in chop_cells(unit.lstrip(), width) if part] or [""]
        lines += full
    if line.strip():
        lines.append(line.rstrip())
    return lines


_TICK_SECONDS = 0.1

_LINE_AFTER_SECONDS = 0.3
"""Shorter silences need no explanation."""

_DOT_AFTER_SECONDS = 0.7
"""Well below two seconds: while a library is loaded, the thread may have to wait for its turn."""


_ROWS_LINE_AFTER_SECONDS = 2.0
"""Between two lines in a pipe that say how many rows are done."""


class RowsDone(Protocol):
    """Rows of a piece of work that are done."""

    rows: int
    total_rows: int | None

    def pace(self) -> str:
        """How many are done, and how fast."""
        ...


@dataclass
class _Work:
    text: str
    began: float = field(default_factory=time.monotonic)
    told: bool = False
    count: RowsDone | None = None

    def sentence(self) -> str:
        """The sentence with the seconds so far."""
        seconds = int(time.monotonic() - self.began)
        return t("{what} {seconds} s", what=self.text, seconds=seconds) if seconds else self.text


class _Teller:
    """The thread, what is being done, and when something was last said."""

    def __init__(self) -> None:
        encodable(sys.stderr)
        self.bar_is_shown = False
        self._at_terminal = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "")
        self._lock = threading.RLock()
        self._works: list[_Work] = []
        self._last_word = self._last_rows = time.monotonic()
        self._dots = False
        self._live: Live | None = None
        self._spinner: Spinner
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="memfit-waiting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self.make_way()

    def begin(self, text: str) -> _Work:
        with self._lock:
            work = _Work(text)
            self._works.append(work)
            return work

    def end(self, work: _Work) -> None:
        with self._lock:
            if work in self._works:
                self._works.remove(work)
            if self._dots and work.told:
                self._write(" " + t("{seconds} s", seconds=int(time.monotonic() - work.began)))
            self._leave_line()

    def count(self, rows: RowsDone | None) -> None:
        with self._lock:
            if self._works:
                self._works[-1].count = rows
            if rows is None:
                self._leave_line()
            self._last_rows = time.monotonic()

    def make_way(self) -> None:
        """Clears the line for other output."""
        with self._lock:
            self._leave_line()
            self._last_word = time.monotonic()

    def sentence(self) -> str:
        """What is being done, once that takes a moment; empty otherwise."""
        with self._lock:
            work = self._work()
            if work is None or time.monotonic() - work.began < _LINE_AFTER_SECONDS:
                return ""
            return work.sentence()

    def _work(self) -> _Work | None:
        return self._works[-1] if self._works and self._works[-1].text else None

    def _tell(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            with self._lock:
                if self._over.is_set():
                    return
                # A stream that was closed or a terminal that is gone ends no run.
                with contextlib.suppress(OSError, ValueError):
                    self._tick()

    def _tick(self) -> None:
        if self.bar_is_shown or not self._works:
            return
        work, silent_seconds = self._work(), time.monotonic() - self._last_word
        if self._at_terminal:
            if work is not None and silent_seconds >= _LINE_AFTER_SECONDS:
                self._spin(work)
        elif work is not None and not work.told:
            if silent_seconds >= _LINE_AFTER_SECONDS:
                self._leave_line()
                self._write(printable(work.text) + "\n")
                work.told = True
        elif work is not None and work.count is not None and self._is_rows_line_due():
            self._leave_line()
            self._write(work.count.pace() + "\n")
            self._last_rows = time.monotonic()
        elif silent_seconds >= _DOT_AFTER_SECONDS:
            self._write(".")
            self._dots = True

    def _is_rows_line_due(self) -> bool:
        return time.monotonic() - self._last_rows >= _ROWS_LINE_AFTER_SECONDS

    def _spin(self, work: _Work) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        if self._live is None:
            out = Console(stderr=True, highlight=False, markup=False, emoji=False)
            frames = "line" if out.options.ascii_only else "dots"
            # Streams are not taken over: the main thread may be exchanging them itself.
            self._spinner = Spinner(frames)
            self._live = Live(
                self._spinner,
                console=out,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        said = work.sentence() if work.count is None else work.text
        self._spinner.update(text=Text(printable(said), no_wrap=True, overflow="ellipsis"))
        self._live.update(self._spinner if work.count is None else self._bar(work.count))

    def _bar(self, count: RowsDone) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(count.total_rows, count.rows) if count.total_rows else ""
        line.add_row(self._spinner, bar, Text(count.pace()))
        return line

    def _leave_line(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError, ValueError):
                live.stop()
        if self._dots:
            self._write("\n")
            self._dots = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
        self._last_word = time.monotonic()


_teller: _Teller | None = None


def _forget() -> None:
    """Resets the state in a forked worker, which has no thread and may hold a dead lock."""
    global _teller
    _teller = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def telling(*, quiet: bool = False) -> Iterator[None]:
    """Inside, `doing` is shown on the terminal; a nested one changes nothing."""
    global _teller
    if quiet or _teller is not None:
        yield
        return
    teller = _teller = _Teller()
    teller.start()
    try:
        yield
    finally:
        _teller = None
        teller.stop()


@contextlib.contextmanager
def doing(text: str) -> Iterator[None]:
    """A piece of work, said in a few words; without any, dots alone show that it goes on."""
    teller = _teller
    if teller is None:
        yield
        return
    work = teller.begin(text)
    try:
        yield
    finally:
        teller.end(work)


def show_count(rows: RowsDone | None) -> None:
    """The innermost piece of work shows these rows; None ends that."""
    if _teller is not None:
        _teller.count(rows)


def make_way() -> None:
    """Called before anything else is printed to stderr."""
    if _teller is not None:
        _teller.make_way()


def sentence() -> str:
    """What is being done just now, for a display that has a line for it."""
    return _teller.sentence() if _teller is not None else ""


def is_told() -> bool:
    """Whether `doing` is shown."""
    return _teller is not None


def shown_by_bar(shown: bool) -> None:
    """A progress bar takes the terminal, or gives it back."""
    if _teller is not None:
        _teller.make_way()
        _teller.bar_is_shown = shown


class _Translated:
    """Errors in the language spoken."""

    def t(self, message: str, /, **values: Any) -> str:
        return t(message, **values)

    def shown(self, text: object, /) -> str:
        return shown(text)


speak_with(_Translated())
