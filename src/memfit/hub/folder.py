"""Which files of a folder are a model that others can use; all else stays where it is.

A result folder also holds the texts the model gets wrong (evaluation.json, report.html), local
paths (run.toml) and the optimizer's state: none of that belongs on a hub.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.config import ModelConfig
from memfit.errors import ModelError
from memfit.messages import t
from memfit.models import check_model_folder

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_CONFIG = ("config.json", "generation_config.json", "modeling_*.py", "configuration_*.py")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "*.model", "chat_template.jinja", "tokenization_*.py",
)  # fmt: skip
_VOCABULARY = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What goes to a hub, and where."""

    repo: str
    files: tuple[Path, ...]
    """They lie in one folder, and at the top of the repository."""
    card: bytes
    licence: str
    private: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The files in the repository."""
        return (*(file.name for file in self.files), "README.md")

    @property
    def size_bytes(self) -> int:
        """All of them together."""
        return sum(file.stat().st_size for file in self.files) + len(self.card)


def files_to_push(folder: Path) -> tuple[Path, ...]:
    """The model's and the tokenizer's files, or what is missing of them."""
    if not folder.is_dir():
        raise ModelError(
            t("there is no folder {folder}; give the output folder of a run", folder=folder)
        )
    if (folder / "run.toml").is_file() and not _matching(folder, (*_WEIGHTS, *_OLD_WEIGHTS)):
        raise ModelError(
            t(
                "the run in {folder} has not finished; continue it with memfit train --resume "
                "--output-dir {folder}",
                folder=folder,
            )
        )
    check_model_folder(ModelConfig(model=str(folder)))
    weights = _matching(folder, _WEIGHTS) or _matching(folder, _OLD_WEIGHTS)
    if not _matching(folder, _VOCABULARY):
        raise ModelError(
            t(
                "the folder {folder} has no tokenizer, and a model without one is of no use to "
                "others; write it there with tokenizer.save_pretrained({path})",
                folder=folder,
                path=repr(str(folder)),
            )
        )
    found = {*_matching(folder, _CONFIG), *_matching(folder, _TOKENIZER), *weights}
    return tuple(sorted(found))


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [
        item
        for item in folder.iterdir()
        if item.is_file() and any(fnmatch.fnmatchcase(item.name, each) for each in patterns)
    ]
