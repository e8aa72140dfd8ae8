"""The HTTP API: TEI's and vLLM's forms, limits, keys, and what it says of itself."""

from __future__ import annotations

import http.client
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import InferenceClient

from memfit.errors import ConfigError
from memfit.run.inference import Classifier
from memfit.serve.http_api import Limits, make_app
from memfit.serve.protection import Protection, read_keys
from memfit.serve.server import bound_socket, served_in_thread

LIMITS = Limits(batch_tokens=256, texts=5, waiting_texts=40, seconds=20.0)


@pytest.fixture(scope="module")
def classifier(tiny_model_dir: Path) -> Classifier:
    return Classifier.load(tiny_model_dir, device="cpu")


@pytest.fixture(scope="module")
def url(classifier: Classifier) -> Iterator[str]:
    app = Protection(make_app(classifier, "tiny", "torch", LIMITS), most_body_bytes=4000)
    with served_in_thread(app, bound_socket("127.0.0.1", 0)) as address:
        yield address


def send(
    url: str, path: str, body: Any = None, method: str = "POST", **headers: str
) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    named = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection.request(method, path, data, named)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    kind = answer.headers.get("Content-Type", "")
    return answer.status, json.loads(text) if "json" in kind and text else text


def test_one_text_several_texts_and_lists_of_one(url: str, classifier: Classifier) -> None:
    answer = classifier.predict("服務很好", progress=False)[0]
    status, said = send(url, "/predict", {"inputs": "服務很好"})
    assert status == 200
    scores = {one["label"]: one["score"] for one in said}
    assert scores == pytest.approx(dict(answer.scores), abs=1e-4)
    assert said[0]["score"] >= said[1]["score"]
    for inputs in (["服務很好", "髒"], [["服務很好"], ["髒"]]):
        several = send(url, "/predict", {"inputs": inputs})[1]
        assert [one["label"] for one in several[0]] == [one["label"] for one in said]
        assert len(several) == 2
    assert len(send(url, "/predict", {"inputs": "服務很好", "top_k": 1})[1]) == 1
    raw = send(url, "/predict", {"inputs": "服務很好", "raw_scores": True})[1]
    logits = classifier.logits(["服務很好"], progress=False)[0]
    assert sorted(one["score"] for one in raw) == pytest.approx(sorted(logits), abs=1e-4)


def test_a_client_of_hugging_face_works_unchanged(
    url: str, classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    client = InferenceClient(url)
    (first, *_) = client.text_classification("服務很好")
    expected = classifier.predict("服務很好", progress=False)[0]
    assert (first.label, first.score) == (expected.label, pytest.approx(expected.score, abs=1e-4))


def test_the_form_of_vllm(url: str, classifier: Classifier) -> None:
    status, said = send(url, "/classify", {"model": "tiny", "input": ["好", "髒"]})
    assert status == 200
    assert said["object"] == "list"
    expected = classifier.predict(["好", "髒"], progress=False)
    assert [one["label"] for one in said["data"]] == [one.label for one in expected]
    assert said["data"][1]["probs"] == pytest.approx(list(expected[1].scores.values()), abs=1e-4)
    assert said["usage"]["total_tokens"] == 6


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"inputs": ["好"] * 6}, 413, "at most 5"),
        ({"inputs": "好" * 100, "truncate": False}, 413, "64 tokens"),
        ({"inputs": "x" * 5000}, 413, "4,000 bytes"),
        ({"inputs": []}, 422, "empty"),
        ({"inputs": [["a", "b", "c"]]}, 422, "inputs.0"),
        ({"inputs": 7}, 422, "inputs"),
        ({"text": "好"}, 422, "inputs"),
        ({"inputs": "好", "top_k": 0}, 422, "top_k"),
        (b"{", 422, "body"),
        (b"\xff\xfe", 422, "body"),
    ],
)
def test_wrong_requests_say_what_is_wrong(url: str, body: Any, status: int, words: str) -> None:
    found, said = send(url, "/predict", body)
    assert found == status
    assert words in json.dumps(said)


def test_random_bytes_leave_the_server_as_it_was(url: str) -> None:
    random.seed(1)
    for _ in range(200):
        body = random.randbytes(random.randrange(200))
        assert send(url, "/predict", body)[0] in (400, 422)
    assert send(url, "/predict", {"inputs": "好"})[0] == 200


def test_it_says_what_it_is_and_what_it_has_done(url: str) -> None:
    send(url, "/predict", {"inputs": "好"})
    assert send(url, "/health", method="GET") == (200, {"status": "ok"})
    info = send(url, "/info", method="GET")[1]
    assert info["model_type"]["classifier"]["id2label"] == {"0": "負評", "1": "正評"}
    assert (info["max_input_length"], info["max_client_batch_size"]) == (64, 5)
    text = send(url, "/metrics", method="GET")[1]
    assert 'memfit_requests_total{path="/predict",status="200"}' in text
    assert "memfit_waiting_texts 0" in text
    assert send(url, "/docs", method="GET")[0] == 200
    assert send(url, "/nowhere", method="GET")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:1"])
def test_another_name_gets_nothing_on_loopback(url: str, host: str) -> None:
    assert send(url, "/predict", {"inputs": "好"}, Host=host)[0] == 403


def test_a_body_without_a_length_is_counted(url: str) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    pieces = (b"x" * 1000 for _ in range(50))
    connection.request("POST", "/predict", pieces, {"Content-Type": "application/json"},
                       encode_chunked=True)  # fmt: skip
    assert connection.getresponse().status in (400, 413)
    connection.close()
    assert send(url, "/health", method="GET")[0] == 200


def test_keys_are_asked_for_and_compared(classifier: Classifier, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecret-1\n\nsecret-2\n")
    keys = read_keys(str(file))
    app = make_app(classifier, "tiny", "torch", LIMITS)
    guarded = Protection(app, most_body_bytes=4000, keys=keys, loopback=False)
    with served_in_thread(guarded, bound_socket("127.0.0.1", 0)) as url:
        body = {"inputs": "好"}
        assert send(url, "/predict", body)[0] == 401
        assert send(url, "/predict", body, Authorization="Bearer secret-3")[0] == 401
        assert send(url, "/predict", body, Authorization="Bearer secret-2")[0] == 200
        assert send(url, "/predict", body, Authorization="Bearer secret-1", Host="a.b")[0] == 200
        assert send(url, "/health", method="GET")[0] == 200
        assert send(url, "/info", method="GET")[0] == 401
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_keys(str(file))


def test_a_port_in_use_is_one_sentence() -> None:
    with bound_socket("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            bound_socket("127.0.0.1", first.getsockname()[1])


def test_too_many_waiting_texts_are_answered_with_429(classifier: Classifier) -> None:
    app = make_app(classifier, "tiny", "torch", Limits(batch_tokens=64, waiting_texts=1, texts=5))
    with served_in_thread(
        Protection(app, most_body_bytes=4000), bound_socket("127.0.0.1", 0)
    ) as url:
        assert send(url, "/predict", {"inputs": ["好", "髒"]})[0] == 429
        assert send(url, "/predict", {"inputs": "好"})[0] == 200


@pytest.mark.skipif(os.name == "nt", reason="addresses as on POSIX")
def test_other_machines_need_a_key(tiny_model_dir: Path) -> None:
    from memfit.cli import run

    assert run(["serve", str(tiny_model_dir), "--host", "0.0.0.0", "--port", "0"]) == 2
