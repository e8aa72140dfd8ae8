"""Files that are never seen half-written, and JSON in and out of them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any

from memfit.errors import OutputError


@contextmanager
def atomic_writer(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """A file that appears under its name only when it is complete."""
    handle = tempfile.NamedTemporaryFile(  # noqa: SIM115 (it outlives the block, to be renamed)
        "w",
        encoding=encoding,
        errors="replace",  # half an emoji, as broken JSON carries, must not cost the file
        newline="",
        dir=path.parent,
        prefix=f".{path.name}.",
        delete=False,
    )
    try:
        with handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        # Private by default; the result should be as readable as any file made here.
        os.chmod(handle.name, 0o666 & ~_umask())
        os.replace(handle.name, path)
    except BaseException:
        Path(handle.name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """Atomic, readable, UTF-8."""
    with atomic_writer(path) as file:
        json.dump(plain(values), file, ensure_ascii=False, indent=2, allow_nan=False)
        file.write("\n")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file; OutputError when it is not there or is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OutputError(
            f"there is no {path.name} in {path.parent}; name the output folder of a finished run"
        ) from None
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise OutputError(f"cannot read {path}: it holds no JSON object")
    return values


def plain(value: Any) -> Any:
    """What JSON can hold: numpy's numbers as ours, names as text, NaN and infinity as null."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
