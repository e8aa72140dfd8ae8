"""TOML in and out: reading is the standard library's, writing is what our plain values need."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError
from memfit.messages import t
from memfit.safe_text import without_tokens

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
    """Top-level values first, then one [table] for each mapping; deeper mappings stay inline.

    No access token is written, wherever it was put.
    """
    lines = [
        f"{_key(key)} = {_value(value)}"
        for key, value in tables.items()
        if not isinstance(value, Mapping)
    ]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(key)} = {_value(value)}" for key, value in table.items()]
    return without_tokens("\n".join(lines).lstrip("\n") + "\n")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))  # inf and nan are spelt the same in TOML
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    return _string(str(getattr(value, "value", value)))  # enums by their value, paths as text
