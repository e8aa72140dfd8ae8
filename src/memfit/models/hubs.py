"""Where a model comes from and goes to: a folder, the Hugging Face Hub or ModelScope."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError, MemfitError, nearest
from memfit.printing import clean, without_tokens


def reason(error: BaseException, *secrets: str | None) -> str:
    """The first line of an error or of what caused it, with every secret taken out."""
    text = str(error).strip() or type(error).__name__
    return without(text.splitlines()[0].rstrip(" .:"), *secrets)


def without(text: str, *secrets: str | None) -> str:
    """The text on one line, without these secrets and without anything that looks like one."""
    for secret in secrets:
        if secret and secret.strip():
            text = text.replace(secret.strip(), "…")
    return without_tokens(clean(text))


def causes(error: BaseException) -> list[BaseException]:
    """The error and all that led to it."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found


def is_connection(error: BaseException) -> bool:
    """Whether it is the connection that failed, and not what was asked for."""
    # The HTTP library under huggingface_hub has changed its name; its classes have not.
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__) or isinstance(
        error, ConnectionError | TimeoutError
    )


@contextlib.contextmanager
def explained(sentence: Callable[[Exception], MemfitError]) -> Iterator[None]:
    """Makes every error of a hub's client the one that `sentence` returns."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        raise sentence(error) from None


def is_set(variable: str) -> bool:
    """Whether a switch of the environment is on, as the clients read it."""
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def refuse_if(offline: bool) -> None:
    """Raises if the environment keeps every request in."""
    if offline:
        raise ConfigError(
            "the hub is switched off (HF_HUB_OFFLINE=1); take that out of the environment first"
        )


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What goes to a hub, and where."""

    repo: str
    folder: Path
    files: tuple[Path, ...]
    """They lie in the folder, and at the same place in the repository."""
    card: bytes
    licence: str
    private: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The files in the repository."""
        return (*self.paths, "README.md")

    @property
    def paths(self) -> dict[str, Path]:
        """The files by their names in the repository."""
        return {file.relative_to(self.folder).as_posix(): file for file in self.files}

    @property
    def size_bytes(self) -> int:
        """Bytes of all files and the card."""
        return sum(file.stat().st_size for file in self.files) + len(self.card)


HUBS = ("hub", "modelscope")
MODELSCOPE_PREFIX = "modelscope:"


def login(to: str = "hub", *, token: str | None = None, force: bool = False) -> str:
    """Logs in with the hub's own client, which keeps the token; returns the user's name."""
    check_hub(to)
    name: str = _client(to).login(token, force=force)
    return name


def endpoint(to: str = "hub") -> str:
    """The address of a hub: its own, or the mirror that the environment names."""
    check_hub(to)
    address: str = _client(to).endpoint()
    return address


def source_of(name: str, *, weights: bool = True) -> str:
    """What transformers loads a model from: the name itself, or a folder it was downloaded to.

    A hub that does not answer is asked once, for a few seconds; what the cache holds is then
    read from there, instead of waiting for every single file.
    """
    return _found(name, weights)


@functools.cache
def _found(name: str, weights: bool) -> str:
    if name.startswith(MODELSCOPE_PREFIX):
        from memfit.models import modelscope

        return str(modelscope.download(name.removeprefix(MODELSCOPE_PREFIX), weights=weights))
    if Path(name).is_dir():
        return name
    from memfit.models import huggingface

    return huggingface.source_of(name, weights=weights)


def check_hub(to: str) -> None:
    """Only these two are known."""
    if to not in HUBS:
        said = {"value": repr(to), "choices": ", ".join(HUBS), "hint": nearest(to, HUBS)}
        raise ConfigError("{flag} is {value}; it is one of {choices}.{hint}", flag="--to", **said)


def _client(to: str) -> Any:
    """The module that speaks to a hub."""
    if to == "modelscope":
        from memfit.models import modelscope

        return modelscope
    from memfit.models import huggingface

    return huggingface
