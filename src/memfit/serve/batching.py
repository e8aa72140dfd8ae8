"""Requests that arrive together are answered together.

One thread owns the model. It keeps a pool of tokenized texts, takes the shortest that fit into one
batch of tokens, answers them, and looks again: texts that came meanwhile join the next batch. A
text that has waited long goes first, however long it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from memfit.memory.out_of_memory import is_out_of_memory
from memfit.records.scoring import Array
from memfit.run.inference import Classifier, Text

LONGEST_WAIT_SECONDS = 2.0
"""After this long a text is answered before shorter ones."""


class QueueFullError(Exception):
    """More texts wait than the server holds."""


class TooLongError(Exception):
    """A text has more tokens than the model takes, and the client asked not to cut it."""


@dataclass(frozen=True)
class Answer:
    """The logits of one request's texts, and how many tokens they have."""

    logits: Array
    tokens: int


@dataclass
class _Request:
    texts: Sequence[Text]
    cut: bool
    future: Future[Answer] = field(default_factory=Future)
    logits: Array = field(default_factory=lambda: np.empty(0))
    missing: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _Row:
    request: _Request
    index: int
    encoded: dict[str, list[int]]
    arrived: float

    @property
    def tokens(self) -> int:
        return len(self.encoded["input_ids"])


@dataclass
class Counts:
    """What the batcher has done so far."""

    texts: int = 0
    tokens: int = 0
    batches: int = 0
    waiting_texts: int = 0


class Batcher:
    """Answers texts in batches of at most `batch_tokens`, padding included."""

    def __init__(self, classifier: Classifier, *, batch_tokens: int, most_waiting: int) -> None:
        self.classifier = classifier
        self.batch_tokens = batch_tokens
        self.counts = Counts()
        self._most_waiting = most_waiting
        self._arrived: list[_Request] = []
        self._rows: list[_Row] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)

    def start(self) -> None:
        """Starts the thread that owns the model."""
        self._thread.start()

    def close(self) -> None:
        """Answers what was accepted, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def submit(self, texts: Sequence[Text], *, cut: bool = True) -> Future[Answer]:
        """Accepts texts, or raises QueueFullError; a future that is cancelled is not computed."""
        request = _Request(texts, cut, missing=len(texts))
        with self._changed:
            if self._closed or self.counts.waiting_texts + len(texts) > self._most_waiting:
                raise QueueFullError
            self.counts.waiting_texts += len(texts)
            self._arrived.append(request)
            self._changed.notify()
        return request.future

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._arrived or self._rows or self._closed):
                    self._changed.wait()
                arrived, self._arrived = self._arrived, []
            if not arrived and not self._rows:
                return  # closed, and everything is answered
            for request in arrived:
                self._tokenize(request)
            self._drop_cancelled()
            if self._rows:
                self._answer(self._next_batch())

    def _tokenize(self, request: _Request) -> None:
        if request.future.cancelled():
            self._done_with(request)
            return
        try:
            encoded = self.classifier.encode(list(request.texts), cut=request.cut)
            lengths = [len(ids) for ids in encoded["input_ids"]]
            if not request.cut and max(lengths) > self.classifier.max_length:
                raise TooLongError
        except Exception as error:
            self._fail(request, error)
            return
        request.tokens = sum(lengths)
        now = time.monotonic()
        self._rows += [
            _Row(request, index, {name: column[index] for name, column in encoded.items()}, now)
            for index in range(len(request.texts))
        ]

    def _drop_cancelled(self) -> None:
        """Forgets what clients that went away had asked for."""
        gone = {
            id(row.request): row.request for row in self._rows if row.request.future.cancelled()
        }
        for request in gone.values():
            self._done_with(request)
        self._rows = [row for row in self._rows if id(row.request) not in gone]

    def _next_batch(self) -> list[_Row]:
        """Takes rows of about one length out of the pool: the shortest, or around the oldest."""
        self._rows.sort(key=lambda row: row.tokens)
        oldest = min(range(len(self._rows)), key=lambda index: self._rows[index].arrived)
        late = time.monotonic() - self._rows[oldest].arrived > LONGEST_WAIT_SECONDS
        first = oldest if late else 0
        last = first + 1
        while last < len(self._rows):
            if (last + 1 - first) * self._rows[last].tokens > self.batch_tokens:
                break
            last += 1
        batch = self._rows[first:last]
        del self._rows[first:last]
        return batch

    def _answer(self, batch: list[_Row]) -> None:
        try:
            logits = self.classifier.forward([row.encoded for row in batch])
        except Exception as error:
            if is_out_of_memory(error) and len(batch) > 1:
                self.batch_tokens = max(self.batch_tokens // 2, 1)
                self._rows += batch
                return
            for request in {id(row.request): row.request for row in batch}.values():
                self._fail(request, error)
            return
        self.counts.batches += 1
        for row, answer in zip(batch, logits, strict=True):
            request = row.request
            if not len(request.logits):
                request.logits = np.empty((len(request.texts), logits.shape[1]), logits.dtype)
            request.logits[row.index] = answer
            request.missing -= 1
            self.counts.texts += 1
            self.counts.tokens += row.tokens
            if request.missing == 0:
                self._done_with(request)
                if request.future.set_running_or_notify_cancel():
                    request.future.set_result(Answer(request.logits, request.tokens))

    def _fail(self, request: _Request, error: Exception) -> None:
        self._rows = [row for row in self._rows if row.request is not request]
        if not request.future.done():
            self._done_with(request)
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)

    def _done_with(self, request: _Request) -> None:
        with self._changed:
            self.counts.waiting_texts -= len(request.texts)
