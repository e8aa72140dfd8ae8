"""The batcher: requests answered together, in order of need, none lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memfit.run.inference import Classifier
from memfit.serve.batching import Batcher, QueueFullError, TooLongError

TEXTS = ["服務很好", "房間", "早餐不好吃房間也很髒服務很差", "好", "不好"]


@pytest.fixture
def classifier(tiny_model_dir: Path) -> Classifier:
    return Classifier.load(tiny_model_dir, device="cpu")


@pytest.fixture
def batcher(classifier: Classifier) -> Iterator[Batcher]:
    made = Batcher(classifier, batch_tokens=64, most_waiting=50)
    yield made
    if made._thread.is_alive():
        made.close()


def test_answers_are_those_of_the_classifier(batcher: Batcher, classifier: Classifier) -> None:
    batcher.start()
    futures = [batcher.submit([text]) for text in TEXTS] + [batcher.submit(TEXTS)]
    expected = classifier.logits(TEXTS, progress=False)
    for index, future in enumerate(futures[:-1]):
        assert np.abs(future.result(30).logits - expected[index]).max() < 1e-5
    together = futures[-1].result(30)
    assert np.abs(together.logits - expected).max() < 1e-5
    assert together.tokens == sum(len(ids) for ids in classifier.encode(TEXTS)["input_ids"])
    assert batcher.counts.waiting_texts == 0


def test_what_waits_is_answered_in_few_batches_the_short_first(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[list[int]] = []
    forward = Classifier.forward

    def seen(self: Classifier, rows: list[dict[str, list[int]]]) -> Any:
        widths.append([len(row["input_ids"]) for row in rows])
        return forward(self, rows)

    monkeypatch.setattr(Classifier, "forward", seen)
    futures = [batcher.submit([text]) for text in TEXTS * 4]
    batcher.start()
    for future in futures:
        future.result(30)
    assert len(widths) < len(futures) / 2
    assert all(len(rows) * max(rows) <= 64 or len(rows) == 1 for rows in widths)
    assert [max(rows) for rows in widths] == sorted(max(rows) for rows in widths)


def test_a_full_queue_refuses_and_a_cancelled_request_makes_room(batcher: Batcher) -> None:
    first = batcher.submit(["好"] * 45)
    with pytest.raises(QueueFullError):
        batcher.submit(["好"] * 6)
    assert first.cancel()
    batcher.start()
    last = batcher.submit(["好"] * 5)
    last.result(30)
    assert batcher.counts.waiting_texts == 0
    assert batcher.counts.texts == 5


def test_a_text_that_must_not_be_cut_is_refused_alone(batcher: Batcher) -> None:
    batcher.start()
    long, short = batcher.submit(["好" * 200], cut=False), batcher.submit(["好"])
    with pytest.raises(TooLongError):
        long.result(30)
    assert short.result(30).logits.shape == (1, 2)
    assert batcher.submit(["好" * 200]).result(30).tokens == 64


def test_memory_that_runs_out_makes_batches_smaller(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Classifier.forward

    def fails_above_two(self: Classifier, rows: list[dict[str, list[int]]]) -> Any:
        if len(rows) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return forward(self, rows)

    monkeypatch.setattr(Classifier, "forward", fails_above_two)
    future = batcher.submit(["好"] * 12)
    batcher.start()
    assert future.result(30).logits.shape == (12, 2)
    assert batcher.batch_tokens < 64


def test_closing_answers_what_was_accepted(batcher: Batcher) -> None:
    futures = [batcher.submit(TEXTS) for _ in range(8)]
    batcher.start()
    batcher.close()
    assert all(len(future.result(0).logits) == len(TEXTS) for future in futures)
    with pytest.raises(QueueFullError):
        batcher.submit(["好"])


def test_many_clients_at_once_lose_nothing(batcher: Batcher, classifier: Classifier) -> None:
    batcher.start()
    expected = classifier.logits(TEXTS, progress=False)
    wrong: list[int] = []

    def client(number: int) -> None:
        for turn in range(20):
            index = (number + turn) % len(TEXTS)
            got = batcher.submit([TEXTS[index]]).result(60).logits
            if np.abs(got - expected[index]).max() > 1e-5:
                wrong.append(index)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert batcher.counts.texts == 160
