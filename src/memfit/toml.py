"""Reads TOML files with tomllib and writes them with tomli-w."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError
from memfit.messages import t
from memfit.safe_text import without_tokens


def read(path: Path) -> dict[str, Any]:
    """The file's values; an unreadable file is a ConfigError that says where."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            t("cannot read the configuration {path}: {reason}", path=path, reason=reason)
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            t("{path} is not a TOML file: {reason}", path=path, reason=error)
        ) from None


def dumps(tables: Mapping[str, Any]) -> str:
    """Returns the tables as TOML, each value that is not a table before those that are.

    No access token is written, wherever it was put.
    """
    import tomli_w  # only what writes a file waits for it

    return without_tokens(tomli_w.dumps(_plain(tables)))


def _plain(value: Any) -> Any:
    """Returns the value in TOML's types: enums by their value, paths and all else as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str)) else str(value)
