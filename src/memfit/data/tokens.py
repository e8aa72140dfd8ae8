"""Texts to token ids, cut at `max_length` but not padded, and kept for the next run of a task.

A table is known by its texts and labels, its tokenizer, the length and the installed versions. The
files lie in the cache folder; `--no-cache` reads none of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from memfit.config import files
from memfit.data.reading import column_of
from memfit.data.tables import LengthBin, LengthSummary, TextData, TokenizedData
from memfit.data.working_files import progress_bar, quiet_datasets, room_on_disk
from memfit.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

_FOLDER = "tokens"

_DIGEST_BYTES = hashlib.sha256().digest_size
"""A file ends with the checksum of its rows: after a power cut its end may be zeros."""

_MOST_FILE_BYTES = 500_000_000

_MOST_BYTES = 2_000_000_000
"""The most that all files together may take; the oldest are removed first."""


def place_of_tokens(dataset: Dataset, tokenizer: Any, max_length: int) -> Path | None:
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
        "installed": [files.installed_versions(), importlib.metadata.version("tokenizers")],
    }  # fmt: skip
    try:
        return files.cache_folder() / _FOLDER / f"{files.cache_digest(values)}.arrow"
    except RuntimeError:  # this user has no home folder
        return None


def read_kept_tokens(place: Path | None) -> Dataset | None:
    """The rows kept there; None where there are none, or not as they were written.

    They are read, not mapped: another run may replace or remove the file meanwhile.
    """
    if place is None or not files.cache_is_used():
        return None
    try:
        stored = place.read_bytes()
    except OSError:
        return None
    rows, digest = memoryview(stored)[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
    if hashlib.sha256(rows).digest() != digest:
        return None
    import pyarrow as pa
    from datasets import Dataset

    with suppress(OSError):
        os.utime(place)  # the newest stay longest
    return Dataset.from_buffer(pa.py_buffer(rows))


def keep_tokens(place: Path | None, tokenized: Dataset) -> None:
    """Writes the rows there, if that can be done."""
    if place is None or tokenized.data.nbytes > _MOST_FILE_BYTES:
        return
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tokenized.data.schema) as writer:
        for batch in tokenized.data.to_batches():
            writer.write_batch(batch)
    rows = sink.getvalue()
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(place, rows, hashlib.sha256(rows).digest())
    files.tidy_cache(f"{_FOLDER}/*", most_bytes=_MOST_BYTES)


def _digest_of_rows(dataset: Dataset) -> str:
    """Digest of all columns, in order."""
    import datasets

    digest = hashlib.sha256()
    if dataset._indices is not None:
        # Which rows of the table, in which order: fetching them one by one takes far longer.
        for batch in dataset._indices.table.to_batches():
            digest.update(batch.serialize())
        dataset = datasets.Dataset(dataset.data, info=dataset.info)
    for table in dataset.with_format("arrow").iter(10_000):
        plain = table.combine_chunks().replace_schema_metadata(None)
        digest.update(plain.schema.to_string().encode())
        for batch in plain.to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_LENGTH = "length_before_cutting"
_BATCH_ROWS = 1000
_BATCH_BYTES = 1 << 26
_MOST_TOKENS = 1 << 20
"""A tokenizer that names no longest text names a number beyond this."""
_EXAMPLE_CHARS = 40
_TEXTS = ("text", "text_pair")

_PARTS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
"""A column of the tokenizer's -> the attribute of the library's rows that holds it."""

_EQUAL_BINS = 9
_PARALLEL = "TOKENIZERS_PARALLELISM"


def tokenize(text_data: TextData, tokenizer: Any, max_length: int) -> TokenizedData:
    """Training and validation rows as token ids, and the lengths of both together."""
    import numpy as np

    with all_cores():
        train, train_lengths = _tokenized(text_data.train, tokenizer, max_length)
        validation, validation_lengths = _tokenized(text_data.validation, tokenizer, max_length)
    lengths = np.concatenate([train_lengths, validation_lengths])
    named = tokenizer.model_max_length
    summary = replace(
        summarize_lengths(lengths, max_length),
        most_tokens=int(named) if named <= _MOST_TOKENS else None,
        **_unknown(train, text_data.train, tokenizer),
    )
    return TokenizedData(train, validation, summary)


def _unknown(tokenized: Dataset, texts: Dataset, tokenizer: Any) -> dict[str, Any]:
    """The share of tokens that the vocabulary lacks, and how a text with most of them begins."""
    import numpy as np

    lacking = tokenizer.unk_token_id
    if lacking is None or lacking == tokenizer.eos_token_id:  # a token that ends texts as well
        return {}
    ids = tokenized.select_columns(["input_ids"]).with_format("arrow")
    words = unknown = 0
    worst, at = 0.0, 0
    for number, table in enumerate(ids.iter(_BATCH_ROWS)):
        rows = table["input_ids"].combine_chunks()
        sizes = np.asarray(rows.value_lengths())
        found = np.asarray(rows.flatten()) == lacking
        before, ends = np.r_[0, np.cumsum(found)], np.cumsum(sizes)
        each = (before[ends] - before[ends - sizes]) / np.maximum(sizes, 1)
        if each.max() > worst:
            worst, at = float(each.max()), number * _BATCH_ROWS + int(each.argmax())
        unknown += int(found.sum())
        words += int((sizes - tokenizer.num_special_tokens_to_add()).clip(0).sum())
    example = texts[at]["text"] if worst else ""
    return {"unknown_share": unknown / max(words, 1), "unknown_example": example[:_EXAMPLE_CHARS]}


@contextmanager
def all_cores() -> Iterator[None]:
    """Lets a fast tokenizer use every core, and data-loading workers that fork later none.

    A variable that the user set stays as it is; the command itself sets it to "false".
    """
    before = os.environ.get(_PARALLEL)
    if before not in (None, "false"):
        yield
        return
    os.environ[_PARALLEL] = "true"
    try:
        yield
    finally:
        # Unset, the library would warn in every worker.
        os.environ[_PARALLEL] = "false"


def tokenize_dataset(
    dataset: Dataset, tokenizer: Any, max_length: int
) -> tuple[Dataset, LengthSummary]:
    """One dataset with `text`, optional `text_pair` and optional `label` as token ids."""
    with all_cores():
        tokenized, lengths = _tokenized(dataset, tokenizer, max_length)
    return tokenized, summarize_lengths(lengths, max_length)


def summarize_lengths(lengths: Array, max_length: int) -> LengthSummary:
    """What a person asks of a length distribution, in a handful of numbers."""
    import numpy as np

    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").astype(int)
    longest = int(lengths.max())
    # Equal bins up to the 99th percentile: one very long text must not flatten the rest.
    width = max(1, math.ceil(int(p99) / _EQUAL_BINS))
    edges = [1 + width * number for number in range(_EQUAL_BINS + 1)]
    bounds = [(first, after - 1) for first, after in pairwise(edges)]
    if longest >= edges[-1]:
        bounds.append((edges[-1], longest))
    return LengthSummary(
        count=len(lengths),
        mean=float(lengths.mean()),
        p50=int(p50),
        p90=int(p90),
        p99=int(p99),
        max=longest,
        max_length=max_length,
        cut_rows=int((lengths > max_length).sum()),
        histogram=tuple(
            LengthBin(first, last, int(((lengths >= first) & (lengths <= last)).sum()))
            for first, last in bounds
            if first <= longest
        ),
    )


def _tokenized(dataset: Dataset, tokenizer: Any, max_length: int) -> tuple[Dataset, Array]:
    import pyarrow as pa

    pair = "text_pair" in dataset.column_names
    specials = tokenizer.num_special_tokens_to_add(pair)
    least = specials + (2 if pair else 1)
    if max_length < least:
        raise DataError(
            "max_length is {length}, and {specials} of that are special tokens; give at "
            "least {least}",
            length=max_length,
            specials=specials,
            least=least,
        )
    if "label" in dataset.column_names:
        dataset = dataset.rename_column("label", "labels")  # keeps its type
    place = place_of_tokens(dataset, tokenizer, max_length)
    if (kept := read_kept_tokens(place)) is not None:
        return kept.remove_columns([_LENGTH]), column_of(kept, _LENGTH)
    bar = progress_bar("tokenizing", total_rows=len(dataset))
    types = {"input_ids": pa.int32(), "token_type_ids": pa.int8(), "attention_mask": pa.int8()}

    def encode(rows: pa.Table) -> pa.Table:
        texts = {name: rows[name].to_pylist() for name in rows.column_names if name in _TEXTS}
        encoded = _encode(texts["text"], texts.get("text_pair"), tokenizer, max_length)
        bar.update(len(rows))
        # Of a split each row is a chunk of its own, and whoever reads them pays for each chunk.
        made = rows.drop_columns(list(texts)).combine_chunks()
        for name, values in encoded.items():
            kind = types.get(name)  # as `datasets` stores it; by the values where it has none
            made = made.append_column(name, pa.array(values, kind and pa.list_(kind)))
        return made.replace_schema_metadata(None)  # it described the texts

    with quiet_datasets(), room_on_disk():
        # Through Arrow: as Python's lists a row would take twice as long.
        tokenized = dataset.with_format("arrow").map(
            encode,
            batched=True,
            batch_size=max(min(_BATCH_ROWS, _BATCH_BYTES // max(_longest_bytes(dataset), 1)), 1),
            load_from_cache_file=False,
            # Named by us: hashing a tokenizer is slow, and nothing is looked up again.
            new_fingerprint=uuid4().hex,
        )
    bar.close()
    tokenized = tokenized.with_format(None)
    keep_tokens(place, tokenized)
    return tokenized.remove_columns([_LENGTH]), column_of(tokenized, _LENGTH)


def _longest_bytes(dataset: Dataset) -> int:
    """The bytes of the longest text, by Arrow's offsets."""
    import pyarrow.compute as pc

    columns = [dataset.data.table[name] for name in _TEXTS if name in dataset.column_names]
    return max(pc.max(pc.binary_length(column)).as_py() or 0 for column in columns)


def _encode(
    texts: list[str], pairs: list[str] | None, tokenizer: Any, max_length: int
) -> dict[str, Any]:
    cut = {"truncation": True, "max_length": max_length, "padding": False}
    encoded = tokenizer(texts[:1], pairs and pairs[:1], **cut)
    parts = _parts(texts, pairs, tokenizer, encoded)
    if parts is None:
        encoded = tokenizer(texts, pairs, **cut)
    else:
        encoded = {name: [getattr(part, _PARTS[name]) for part in parts] for name in encoded}
    lengths = [len(ids) for ids in encoded["input_ids"]]
    if parts is not None and pairs is None:
        # A fast tokenizer keeps what it cut off, each piece with its own special tokens.
        specials = tokenizer.num_special_tokens_to_add()
        for row, length in enumerate(lengths):
            if length >= max_length:
                pieces = parts[row].overflowing
                lengths[row] += sum(len(piece) - specials for piece in pieces)
    else:
        # For pairs those pieces overlap, and slow tokenizers keep none; only the rows that
        # fill max_length can have been cut, so only they are tokenized again.
        full = [row for row, length in enumerate(lengths) if length >= max_length]
        if full:
            again = tokenizer(
                [texts[row] for row in full],
                pairs and [pairs[row] for row in full],
                truncation=False,
                padding=False,
                verbose=False,  # it would warn of lengths the model never sees
            )
            for row, ids in zip(full, again["input_ids"], strict=True):
                lengths[row] = len(ids)
    return {**encoded, _LENGTH: lengths}


def _parts(
    texts: list[str], pairs: list[str] | None, tokenizer: Any, first: Mapping[str, Any]
) -> list[Any] | None:
    """The rows as a fast tokenizer's own library makes them; None for other tokenizers.

    `first` is the first row by the tokenizer itself. That call has told the library where to cut;
    beyond this it only copies, for longer than the library takes on two cores. Where it does more
    to the row, the rows have to go through it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not first.keys() <= _PARTS.keys():
        return None
    inputs = texts if pairs is None else list(zip(texts, pairs, strict=True))
    made: list[Any] = backend.encode_batch(inputs)
    same = all(getattr(made[0], _PARTS[name]) == rows[0] for name, rows in first.items())
    return made if same else None
