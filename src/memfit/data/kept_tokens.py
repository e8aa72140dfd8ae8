"""Tokenized tables of earlier runs, so that the next run of a task does not tokenize again.

A table is known by its texts and labels, its tokenizer, the length and the installed versions. The
files lie in the cache folder; `--no-cache` reads none of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import cache

if TYPE_CHECKING:
    from datasets import Dataset

_FOLDER = "tokens"
_MOST_FILE_BYTES = 500_000_000
_MOST_BYTES = 2_000_000_000
"""Of all files together; the oldest go first."""


def place_of(dataset: Dataset, tokenizer: Any, max_length: int) -> Path | None:
    """Where the tokens of these rows are kept; None for tokenizers that cannot be compared."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()  # each call sets what it needs; here it would be the last call's
    backend.no_padding()
    values = {
        "rows": _digest_of_rows(dataset),
        "tokenizer": hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "settings": [
            type(tokenizer).__name__, tokenizer.truncation_side, tokenizer.model_input_names,
            getattr(tokenizer, "split_special_tokens", False), max_length,
        ],
        "installed": [cache.installed(), importlib.metadata.version("tokenizers")],
    }  # fmt: skip
    try:
        return cache.cache_folder() / _FOLDER / f"{cache.digest(values)}.arrow"
    except RuntimeError:  # this user has no home folder
        return None


def read(place: Path | None) -> Dataset | None:
    """The rows kept there, mapped from the disk; None where there are none."""
    if place is None or not cache.is_used() or not place.is_file():
        return None
    from datasets import Dataset

    try:
        kept = Dataset.from_file(str(place))
    except Exception:  # damaged: pyarrow and datasets raise what they like
        return None
    with suppress(OSError):
        os.utime(place)  # the newest stay longest
    return kept


def keep(place: Path | None, tokenized: Dataset) -> None:
    """Writes the rows there, if that can be done."""
    if place is None or tokenized.data.nbytes > _MOST_FILE_BYTES:
        return
    import pyarrow as pa

    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        schema = tokenized.data.schema
        with pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for batch in tokenized.data.to_batches():
                writer.write_batch(batch)
        part.replace(place)
    except OSError:
        with suppress(OSError):
            part.unlink()
    cache.tidy(f"{_FOLDER}/*.arrow", most_bytes=_MOST_BYTES)


def _digest_of_rows(dataset: Dataset) -> str:
    """Of all columns, in order."""
    digest = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(10_000):
        plain = table.combine_chunks().replace_schema_metadata(None)
        digest.update(plain.schema.to_string().encode())
        for batch in plain.to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()
