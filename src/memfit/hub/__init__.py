"""Hugging Face and ModelScope, down and up.

A model's name is a folder, a hub id (`org/name`) or `modelscope:org/name`; `source_of` says where
transformers reads it from. `push` uploads a trained folder with a model card. Tokens are kept by
the hubs' own clients, and are in nothing memfit writes or says.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError, nearest
from memfit.messages import t
from memfit.safe_text import without_tokens

HUBS = ("hub", "modelscope")
MODELSCOPE_PREFIX = "modelscope:"


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """What was uploaded, and where it is now."""

    repo: str
    url: str
    files: tuple[str, ...]
    uploaded_bytes: int


def push(
    folder: str | os.PathLike[str],
    repo: str,
    *,
    to: str = "hub",
    private: bool = False,
    licence: str | None = None,
) -> PushResult:
    """Uploads the model, its tokenizer and a model card; nothing else of the folder leaves it.

    A README.md somebody wrote into the folder is the card; `licence` is then put into it.
    """
    from memfit.hub.card import card_for, licence_in
    from memfit.hub.folder import Upload, files_to_push

    check_hub(to)
    check_repo(repo)
    path = Path(folder).expanduser()
    files = files_to_push(path)
    card = without_tokens(card_for(path, repo, licence, to))
    upload = Upload(
        repo=repo,
        files=files,
        card=card.encode(),
        licence=licence_in(card) or "other",
        private=private,
    )
    url = _client(to).upload(upload)
    return PushResult(repo=repo, url=url, files=upload.names, uploaded_bytes=upload.size_bytes)


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
        from memfit.hub import modelscope

        return str(modelscope.download(name.removeprefix(MODELSCOPE_PREFIX), weights=weights))
    if Path(name).is_dir():
        return name
    from memfit.hub import huggingface

    return huggingface.source_of(name, weights=weights)


def check_hub(to: str) -> None:
    """Only these two are known."""
    if to not in HUBS:
        said = {"value": repr(to), "choices": ", ".join(HUBS), "hint": nearest(to, HUBS)}
        raise ConfigError(
            t("{flag} is {value}; it is one of {choices}.{hint}", flag="--to", **said)
        )


def check_repo(repo: str) -> None:
    """A name both hubs take, before anything is read or sent."""
    owner, slash, name = repo.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise ConfigError(t("the repository {repo} is not of the form user/name", repo=repr(repo)))
    wrong = sorted({char for char in owner + name if not (char.isalnum() or char in "-_.")})
    if wrong or not repo.isascii():
        raise ConfigError(
            t(
                "the repository {repo} may hold letters, digits, '-', '_' and '.' only",
                repo=repr(repo),
            )
        )


def _client(to: str) -> Any:
    """The module that speaks to a hub."""
    if to == "modelscope":
        from memfit.hub import modelscope

        return modelscope
    from memfit.hub import huggingface

    return huggingface
