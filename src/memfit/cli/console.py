"""Where a command's words go: results to stdout, everything said on the way to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from memfit.config.files import plain
from memfit.i18n import t
from memfit.printing import escaped_json, printable, without_tokens
from memfit.waiting import doing, make_way, telling


def set_up_streams() -> None:
    """UTF-8 into files and pipes; a terminal that lacks a character shows a replacement."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is None:
            continue
        if stream.isatty():
            reconfigure(errors="memfit")
        else:
            reconfigure(encoding="utf-8", errors="memfit")


def quiet_libraries() -> None:
    """Libraries say nothing unless asked to by their own variables; set before their import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not debugging():
        # Each retry of a hub that cannot be reached would be told; the error says it once.
        for name in ("huggingface_hub", "httpx", "httpcore", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=FutureWarning, module=r"memfit\b")
        warnings.filterwarnings("always", category=UserWarning, module=r"memfit\b")
        warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(t("note: {text}", text=message))


def debugging() -> bool:
    """MEMFIT_DEBUG=1 shows tracebacks and other libraries' warnings."""
    return os.environ.get("MEMFIT_DEBUG", "") not in ("", "0")


def say(text: str) -> None:
    """One line on the way."""
    make_way()
    print(printable(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """The result, for a person."""
    print(printable(text), flush=True)


def show_json(values: Any) -> None:
    """The result, for a machine."""
    text = json.dumps(plain(values), ensure_ascii=False, indent=2, allow_nan=False)
    print(escaped_json(without_tokens(text)), flush=True)


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """What libraries print in the meantime goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def working(*, quiet: bool = False) -> Iterator[None]:
    """Shows that libraries are loaded, until the command itself says what it does."""
    with only_results_on_stdout(), telling(quiet=quiet), doing(t("loading libraries …")):
        yield
