"""Uploads a trained model with its tokenizer and its card, and nothing else of its folder.

A result folder also holds the texts the model gets wrong (evaluation.json, report.html), local
paths (run.toml) and the optimizer's state: none of that belongs on a hub.

A model's name is a folder, a hub id (`org/name`) or `modelscope:org/name`; `source_of` says where
transformers reads it from. `push` uploads a trained folder with a model card. Tokens are kept by
the hubs' own clients, and are in nothing memfit writes or says.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.config import ModelConfig
from memfit.errors import ConfigError, ModelError
from memfit.models.hubs import _client, check_hub
from memfit.models.loading import check_model_folder
from memfit.printing import without_tokens

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")

_OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")

_CONFIG = ("config.json", "generation_config.json", "modeling_*.py", "configuration_*.py")

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "*.model", "chat_template.jinja", "tokenization_*.py",
)  # fmt: skip

_ONNX = ("model*.onnx", "model*.onnx.data")

_VOCABULARY = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


def files_to_push(folder: Path) -> tuple[Path, ...]:
    """The model's, the tokenizer's and the exported files, or what is missing of them."""
    if not folder.is_dir():
        raise ModelError(
            "there is no folder {folder}; give the output folder of a run", folder=folder
        )
    if (folder / "run.toml").is_file() and not _matching(folder, (*_WEIGHTS, *_OLD_WEIGHTS)):
        raise ModelError(
            "the run in {folder} has not finished; continue it with memfit train --resume "
            "--output-dir {folder}",
            folder=folder,
        )
    check_model_folder(ModelConfig(model=str(folder)))
    weights = _matching(folder, _WEIGHTS) or _matching(folder, _OLD_WEIGHTS)
    if not _matching(folder, _VOCABULARY):
        raise ModelError(
            "the folder {folder} has no tokenizer, and a model without one is of no use to "
            "others; write it there with tokenizer.save_pretrained({path})",
            folder=folder,
            path=repr(str(folder)),
        )
    found = {*_matching(folder, _CONFIG), *_matching(folder, _TOKENIZER), *weights}
    if (folder / "onnx").is_dir():
        found.update(_matching(folder / "onnx", _ONNX))
    return tuple(sorted(found))


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [
        item
        for item in folder.iterdir()
        if item.is_file() and any(fnmatch.fnmatchcase(item.name, each) for each in patterns)
    ]


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
    intended_use: str = "",
    limitations: str = "",
) -> PushResult:
    """Uploads the model, its tokenizer and a model card; nothing else of the folder leaves it.

    A README.md somebody wrote into the folder is the card; `licence` is then put into it.
    """
    from memfit.models.hubs import Upload
    from memfit.report.model_card import AuthorsWords, card_for, licence_in

    check_hub(to)
    check_repo(repo)
    path = Path(folder).expanduser()
    files = files_to_push(path)
    card = without_tokens(
        card_for(path, repo, licence, to, AuthorsWords(intended_use, limitations))
    )
    upload = Upload(
        repo=repo,
        folder=path,
        files=files,
        card=card.encode(),
        licence=licence_in(card) or "other",
        private=private,
    )
    url = _client(to).upload(upload)
    return PushResult(repo=repo, url=url, files=upload.names, uploaded_bytes=upload.size_bytes)


def check_repo(repo: str) -> None:
    """A name both hubs take, before anything is read or sent."""
    owner, slash, name = repo.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise ConfigError("the repository {repo} is not of the form user/name", repo=repr(repo))
    wrong = sorted({char for char in owner + name if not (char.isalnum() or char in "-_.")})
    if wrong or not repo.isascii():
        raise ConfigError(
            "the repository {repo} may hold letters, digits, '-', '_' and '.' only", repo=repr(repo)
        )
