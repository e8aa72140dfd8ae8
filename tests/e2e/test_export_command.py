"""`memfit export` on a finished run, and the files it wrote behind predict and evaluate."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

import memfit
from memfit.cli import run
from memfit.serve.http_api import Limits, make_app
from memfit.serve.protection import Protection
from memfit.serve.server import bound_socket, served_in_thread

pytestmark = pytest.mark.slow

GOOD, BAD = "服務很好房間也很好", "早餐不好吃房間很髒"


@pytest.fixture(scope="module")
def trained(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    random.seed(0)
    rows = ["review,label"]
    for index in range(160):
        words = GOOD if index % 2 else BAD
        start = random.randrange(4)
        rows.append(f"{words[start:]}{index % 7},{index % 2}")
    table = folder / "reviews.csv"
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    memfit.finetune(
        table, model=tiny_model_dir, output_dir=folder / "run", epochs=3, learning_rate=5e-3,
        max_length=24, quiet=True,
    )  # fmt: skip
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    assert run(["export", str(trained), "--int8", "--json"]) == 0
    return trained


def test_files_lie_where_the_hub_has_them_and_were_scored(exported: Path) -> None:
    said = json.loads((exported / "export.json").read_text(encoding="utf-8"))
    by_name = {one["name"]: one for one in said["variants"]}
    assert set(by_name) == {"torch", "onnx", "onnx-int8"}
    assert by_name["onnx"]["file"] == "onnx/model.onnx"
    assert by_name["onnx"]["logits_off"] < 1e-3
    assert by_name["onnx"]["changed_answers"] == 0
    assert by_name["onnx-int8"]["size_bytes"] < by_name["onnx"]["size_bytes"]
    assert by_name["onnx-int8"]["scheme"]
    assert said["rows"] == 16
    assert "Exported files" in (exported / "report.html").read_text(encoding="utf-8")
    for file in ("onnx/model.onnx", "onnx/model_int8.onnx"):
        assert (exported / file).is_file()


def test_torch_onnx_and_pipeline_answer_alike(exported: Path) -> None:
    texts = [GOOD, BAD, GOOD[2:6], BAD[1:5], GOOD * 6]
    ask = pipeline("text-classification", str(exported), device="cpu")
    plain = ask(texts, truncation=True, max_length=24)
    for backend in ("torch", "onnx"):
        answers = memfit.load(exported, backend=backend).predict(texts, progress=False)
        assert [one.label for one in answers] == [one["label"] for one in plain]
        for one, other in zip(answers, plain, strict=True):
            assert one.score == pytest.approx(other["score"], abs=1e-3)


def test_a_thousand_sentences_are_answered_alike_everywhere(exported: Path) -> None:
    random.seed(3)
    letters = sorted({*GOOD, *BAD})
    texts = ["".join(random.choices(letters, k=random.randint(1, 40))) for _ in range(1000)]
    ask = pipeline("text-classification", str(exported), device="cpu")
    plain = ask(texts, truncation=True, max_length=24, batch_size=64)
    labels, scores = [one["label"] for one in plain], [one["score"] for one in plain]
    for backend in ("torch", "onnx"):
        classifier = memfit.load(exported, backend=backend)
        answers = classifier.predict(texts, progress=False)
        assert [one.label for one in answers] == labels
        assert [one.score for one in answers] == pytest.approx(scores, abs=1e-3)
        app = make_app(classifier, "run", backend, Limits(batch_tokens=512))
        guarded = Protection(app, most_body_bytes=100_000)
        with served_in_thread(guarded, bound_socket("127.0.0.1", 0)) as url:
            parts = [texts[n : n + 50] for n in range(0, 1000, 50)]
            with ThreadPoolExecutor(5) as pool:
                several = pool.map(lambda part: asked(url, part), parts)
                best = [ranked[0] for part in several for ranked in part]
        assert [one["label"] for one in best] == labels
        assert [one["score"] for one in best] == pytest.approx(scores, abs=1e-3)


def asked(url: str, texts: list[str]) -> list[list[dict[str, Any]]]:
    body, kind = json.dumps({"inputs": texts}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/predict", body, kind)) as answer:
        found: list[list[dict[str, Any]]] = json.load(answer)
    return found


def test_the_worker_of_the_example_for_ray_adds_two_columns(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    worker = importlib.import_module("ray_batch").Label(str(exported), "onnx", "review")
    said = worker({"review": [GOOD, BAD], "id": [1, 2]})
    assert said["predicted"] == ["1", "0"]
    assert set(said) == {"review", "id", "predicted", "score"}


def test_predict_and_evaluate_take_the_backend(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, output = exported.parent / "reviews.csv", tmp_path / "labelled.jsonl"
    words = ["predict", str(exported), "--file", str(table), "--output", str(output)]
    assert run([*words, "--backend", "onnx"]) == 0
    assert len(output.read_text(encoding="utf-8").splitlines()) == 160
    figures = []
    for backend in ("torch", "onnx"):
        capsys.readouterr()
        assert run(["evaluate", str(exported), str(table), "--json", "--backend", backend]) == 0
        figures.append(json.loads(capsys.readouterr().out)["metrics"])
    assert figures[0] == pytest.approx(figures[1])


def test_a_file_that_loses_too_much_is_not_written(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ["export", str(exported), "--int8", "--output", str(output), "--most-lost", "-100"]
    assert run(words) == 1
    assert "int8 was not written" in capsys.readouterr().err
    assert (output / "onnx" / "model.onnx").is_file()
    assert not (output / "onnx" / "model_int8.onnx").exists()
    assert memfit.load(output, backend="onnx").predict(GOOD, progress=False)[0].label


def test_wrong_input_is_one_sentence(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*words: str) -> str:
        capsys.readouterr()
        assert run([*words]) == 2
        return capsys.readouterr().err

    assert "has no onnx/model.onnx" in failed(
        "predict", str(exported / "checkpoints" / _first(exported)), GOOD, "--backend", "onnx"
    )
    assert "it is one of torch, onnx, onnx-int8" in failed(
        "predict", str(exported), GOOD, "--backend", "onx"
    )
    assert "there is onnx" in failed("export", str(exported), "--to", "coreml")
    bare = tmp_path / "bare"
    shutil.copytree(exported, bare, ignore=shutil.ignore_patterns("run.toml", "onnx"))
    assert "give a labelled table with --data" in failed("export", str(bare))


def _first(folder: Path) -> str:
    return next((folder / "checkpoints").glob("checkpoint-*")).name
