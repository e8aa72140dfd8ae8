"""Models, finished runs and checkpoints that are wrong in one way each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from malformed import Case, Place, checkpoint_file, model_config, model_file, run_file, signed_state


def models() -> Iterator[tuple[str, Case]]:
    yield "model-missing", lambda place: place.train(place.good(), model=place.folder / "none")
    yield "model-file", lambda place: place.train(place.good(), model=place.good())
    yield "model-name", lambda place: place.train(place.good(), model="a b c")
    yield "model-null", lambda place: place.train(place.good(), model="a\0b")
    yield "model-long", lambda place: place.train(place.good(), model="x" * 5000)
    yield "model-empty", lambda place: [*place.train(place.good()), "--model", ""]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        yield f"{name}-missing", model_file(name, None)
        yield f"{name}-empty", model_file(name, b"")
        yield f"{name}-cut", model_file(name, lambda content: content[: len(content) // 2])
        yield f"{name}-bytes", model_file(name, bytes(range(256)))
        yield f"{name}-list", model_file(name, "[1, 2]")
        yield f"{name}-null", model_file(name, "null")
    yield "tokenizer_config-cut", model_file("tokenizer_config.json", '{"a": ')
    yield "tokenizer_config-list", model_file("tokenizer_config.json", "[]")
    yield "weights-header", model_file("model.safetensors", b"\xff" * 8 + b"{}")
    yield "weights-huge", model_file("model.safetensors", (1 << 62).to_bytes(8, "little"))
    yield "weights-text", model_file("model.safetensors", "not weights")
    yield "config-empty-object", model_file("config.json", "{}")
    yield "config-type", model_config(model_type="nonesuch")
    yield "config-type-number", model_config(model_type=5)
    yield "config-no-type", model_config(model_type=None)
    yield "config-picture", model_config(model_type="vit")
    yield "config-heads", model_config(num_attention_heads=7)
    yield "config-no-heads", model_config(num_attention_heads=0)
    yield "config-hidden", model_config(hidden_size="wide")
    yield "config-hidden-less", model_config(hidden_size=-32)
    yield "config-layers", model_config(num_hidden_layers=-2)
    yield "config-vocabulary", model_config(vocab_size=3)
    yield "config-other-width", model_config(hidden_size=64)
    yield "config-positions", model_config(max_position_embeddings=4)
    yield "config-act", model_config(hidden_act="nonesuch")
    yield "shards-missing", _shards({"bert.pooler.dense.bias": "model-2.safetensors"})
    yield "shards-outside", _shards({"bert.pooler.dense.bias": "../../model.safetensors"})
    yield "shards-list", _shards([])


def _shards(weights: Any) -> Case:
    def write(place: Place) -> list[str]:
        model = place.spoilt_model()
        (model / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": weights}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        return place.train(place.good(), model=model)

    return write


def runs() -> Iterator[tuple[str, Case]]:
    for name in ("summary.json", "evaluation.json"):
        for content in ("", "{", "[]", "null", '{"model": 5}', '{"rows": "x"}', '{"memory": []}',
                        '{"model": "a", "task": "b", "metrics": 5}'):  # fmt: skip
            yield f"report {name} {content}", run_file(name, content, "report", "RUN")
    for content in ("", "{", "[]", "not weights"):
        yield (
            f"predict weights {content}",
            run_file("model.safetensors", content, "predict", "RUN", "好"),
        )
    yield "predict-config", run_file("config.json", "{", "predict", "RUN", "好")
    yield "predict-no-tokenizer", run_file("tokenizer.json", None, "predict", "RUN", "好")
    yield "predict-file", run_file("run.toml", "", "predict", "RUN", "--file", "none.csv")
    yield "evaluate-file", run_file("run.toml", "", "evaluate", "RUN", "none.csv")
    for content in ("", "x", "[data]", "budget = 3.5", "[data]\npath = 5"):
        yield (
            f"resume run.toml {content}",
            run_file("run.toml", content, "train", "--resume", "--output-dir", "RUN"),
        )


def checkpoints() -> Iterator[tuple[str, Case]]:
    for name in (
        "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json",
        "trainer_state.json", "memfit.json", "manifest.json", "tokenizer.json",
    ):  # fmt: skip
        yield f"{name}-gone", checkpoint_file(name, None)
        yield f"{name}-half", checkpoint_file(name, lambda content: content[: len(content) // 2])
        yield f"{name}-zeros", checkpoint_file(name, lambda content: bytes(len(content)))
    for content in (
        "{}", "[]", "null", "5", '{"version": 1}', '{"version": 1, "files": []}',
        '{"version": 1, "files": {"a": 5}}', '{"version": 99, "files": {}}',
    ):  # fmt: skip
        yield f"manifest {content}", checkpoint_file("manifest.json", content)
    yield "state-step", signed_state(global_step="x")
    yield "state-history", signed_state(log_history=5)
    yield "state-unknown", signed_state(nonesuch=5)
    yield "state-callbacks", signed_state(stateful_callbacks=[1])
    yield "not-begun", lambda place: ["train", "--resume", "--output-dir", str(place.folder)]
