"""`memfit estimate`: the flags reach the step, and the numbers come out under their names."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import memfit
from memfit.cli import run
from memfit.config import ModelConfig
from memfit.errors import ConfigError
from memfit.memory.cards import find_card
from memfit.memory.components import Component
from memfit.report.estimate_json import verdict_on
from memfit.report.timeline import moments
from memfit.run.stock_flags import device_for, step_spec
from waits import without_waits

BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
# Tables and their norm, two layers of attention, MLP and two norms, pooler, head.
_EMBEDDINGS = (1000 + 128 + 2) * 64 + 2 * 64
_LAYER = 4 * (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 2 * 2 * 64
PARAMETERS = _EMBEDDINGS + 2 * _LAYER + (64 * 64 + 64) + (64 * 2 + 2)


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    (folder / "config.json").write_text(json.dumps(BERT))
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    code = run(["estimate", *map(str, words), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def spec_of(folder: Path, **options: Any) -> Any:
    kept = {key: options.pop(key) for key in ("dtype", "freeze", "lora") if key in options}
    return step_spec(ModelConfig(model=str(folder), from_scratch=True, **kept), options)


def test_the_json_has_the_numbers_under_their_names(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "--model", config_only, "--batch-size", 8, "--gpu", "T4")
    assert found["parameters"] == found["trainable_parameters"] == PARAMETERS
    parts = found["components"]
    assert list(parts) == [
        "weights", "gradients", "optimizer", "activations", "workspace", "context"
    ]  # fmt: skip
    assert 4 * PARAMETERS <= parts["weights"] < 4 * PARAMETERS + 40 * 512
    tensors = sum(size for name, size in parts.items() if name != "context")
    assert found["peak_allocated_bytes"] == tensors
    assert found["peak_reserved_bytes"] >= found["peak_allocated_bytes"]
    assert found["device_peak_bytes"] == found["peak_reserved_bytes"] + parts["context"]
    assert list(found["phases"]) == ["training", "evaluation", "saving", "resuming"]
    assert found["phases"]["training"]["device_peak_bytes"] == found["device_peak_bytes"]
    most = found["component_maxima"]
    assert 4 * PARAMETERS <= most["gradients"] < 4 * PARAMETERS + 40 * 512
    assert all(most[name] >= size for name, size in parts.items())
    assert found["classic_rules"]["optimizer"] == 8 * PARAMETERS
    assert found["device"]["name"] == "T4 16GB"
    assert found["fits"] is True


def test_a_short_name_and_the_full_one_are_the_same_batch(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = answer(capsys, "--model", config_only, "--batch-size", 4, "--gpu", "T4")
    full = answer(capsys, "--model", config_only, "--per_device_train_batch_size", 4, "--gpu", "T4")
    larger = answer(capsys, "--model", config_only, "--batch-size", 16, "--gpu", "T4")
    assert short == full
    assert larger["components"]["activations"] > 3 * short["components"]["activations"]


def test_the_python_call_gives_the_same_numbers(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--batch-size", 4, "--max-length", 32, "--optim", "sgd", "--gpu", "RTX 3060 12GB")
    found = answer(capsys, "--model", config_only, *words)
    called = memfit.estimate(
        config_only, batch_size=4, max_length=32, optim="sgd", gpu="RTX 3060 12GB"
    )
    assert called.peak.device_bytes == found["device_peak_bytes"]
    assert called.parameters == found["parameters"]


@pytest.mark.parametrize("gpu", ["T4", "cpu"])
def test_the_events_of_the_timeline_add_up_to_the_peak(config_only: Path, gpu: str) -> None:
    # Rows and lengths whose blocks are larger than the tensors in them.
    found = memfit.estimate(config_only, batch_size=29, max_length=123, gpu=gpu)
    highest = max(moments(found.events), key=lambda one: one.total_bytes)
    assert highest.total_bytes == found.peak.allocated_bytes
    held = {**highest.components, Component.CONTEXT: found.peak.components[Component.CONTEXT]}
    assert held == found.peak.components


def test_an_estimate_prints_in_a_line(config_only: Path) -> None:
    shown = repr(memfit.estimate(config_only, batch_size=8, gpu="T4"))
    assert shown.startswith(f"<MemoryEstimate: {PARAMETERS:,} parameters, a peak of ")
    assert len(shown) < 300


def test_for_a_person_it_draws_the_bar_the_rules_and_the_phases(
    config_only: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "timeline.html"
    words = ["--model", str(config_only), "--freeze", "encoder", "--gpu", "T4"]
    assert run(["estimate", *words, "--timeline", str(page)]) == 0
    shown = capsys.readouterr()
    assert f"{PARAMETERS:,} parameters, 130 of them trainable" in shown.out
    assert "fits on T4 16GB" in shown.out
    assert "Peak of a step" in shown.out
    for words_shown in ("4 B a parameter", "8 B a parameter (AdamW)", "the rest"):
        assert words_shown in shown.out
    for phase in ("training", "evaluation", "saving", "resuming"):
        assert phase in shown.out
    assert str(page) in shown.err
    drawn = page.read_text(encoding="utf-8")
    assert drawn.startswith("<!")
    assert "forward and backward" in drawn
    assert "first update" in drawn
    assert not re.search(r"micro\b|update_first|clear\b", drawn[drawn.index("<svg") :])


def test_flash_attention_keeps_less_than_eager(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", config_only, "--bf16", "--gpu", "A100 80GB", "--attn-implementation")
    flash, eager = (answer(capsys, *words, name) for name in ("flash_attention_2", "eager"))
    assert flash["components"]["activations"] < eager["components"]["activations"]
    assert run(["estimate", *map(str, words), "flash_attention_2", "--max-length", "129"]) == 2
    assert "beyond the 128 positions" in capsys.readouterr().err


@pytest.mark.parametrize("layers", [2, 12])
def test_all_layers_can_be_frozen_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BERT, "num_hidden_layers": layers}))
    found = answer(capsys, "--model", tmp_path, "--freeze", layers, "--gpu", "T4")
    assert found["trainable_parameters"] == (64 * 64 + 64) + (64 * 2 + 2)
    assert run(["estimate", "--model", str(tmp_path), "--freeze", str(layers + 1)]) == 2
    assert f"more than the {layers} layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stored", "words", "notes"),
    [
        ("float32", ["--gpu", "T4"], []),
        (
            "bfloat16",
            ["--gpu", "A100 80GB"],
            [
                "the checkpoint is bfloat16 and transformers loads it so: "
                "add --dtype bfloat16 to price that"
            ],
        ),
        ("bfloat16", ["--gpu", "A100 80GB", "--dtype", "bfloat16"], []),
        ("bfloat16", ["--gpu", "A100 80GB", "--bf16"], []),
        (
            "float32",
            ["--gpu", "T4", "--bf16"],
            ["T4 16GB has no bf16 units, which came with capability 8.0: use --fp16"],
        ),
        ("float32", ["--gpu", "T4", "--fp16"], []),
    ],
)
def test_what_the_flags_leave_open_is_noted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stored: str,
    words: list[str],
    notes: list[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BERT, "dtype": stored}))
    assert answer(capsys, "--model", tmp_path, *words)["notes"] == notes
    assert run(["estimate", "--model", str(tmp_path), *words]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert said == [f"note: {note}" for note in notes]


def test_a_context_by_rule_is_said_to_be_one(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for gpu in ("T4", "H200 141GB"):
        assert run(["estimate", "--model", str(config_only), "--gpu", gpu]) == 0
        shown[gpu] = capsys.readouterr().out
    assert "context 151 to 381 MiB, not measured: the most is counted" in shown["T4"]
    assert "(298.2 MiB) of the card are left to its system" in shown["T4"]
    assert "not measured" not in shown["H200 141GB"]


def test_a_card_almost_full_fits_barely(config_only: Path) -> None:
    found = memfit.estimate(config_only, batch_size=4, gpu="T4")
    needed = max(peak.device_bytes for peak in found.phases.values())
    cards = [
        dataclasses.replace(find_card("T4"), total_bytes=size, unknown_bytes=0)
        for size in (needed - 1, needed, round(needed / 0.98), round(needed / 0.96))
    ]
    words = [verdict_on(found, card) for card in cards]
    assert words == ["over", "barely", "barely", "fits"]


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, "fp32"),
        ({"bf16": True}, "bf16"),
        ({"fp16": True}, "fp16"),
        ({"dtype": "bfloat16"}, "pure_bf16"),
        ({"dtype": "float16"}, "pure_fp16"),
        ({"dtype": "float32", "bf16": True}, "bf16"),
        ({"bf16": False}, "fp32"),
    ],
)
def test_precision_is_read_from_the_flags(
    config_only: Path, options: dict[str, Any], precision: str
) -> None:
    assert spec_of(config_only, **options).precision == precision


def test_every_flag_reaches_the_step(config_only: Path) -> None:
    spec = spec_of(
        config_only, batch_size=3, max_length=40, optim="adamw_8bit", eval_batch_size=7,
        gradient_accumulation_steps=2, gradient_checkpointing=True, max_grad_norm=0.5,
        freeze="1", num_labels=5, task="multi_label", padding=False, learning_rate=1e-5,
    )  # fmt: skip
    assert (spec.rows, spec.length, spec.eval_rows) == (3, 40, 7)
    assert (spec.optim, spec.gradient_accumulation_steps) == ("adamw_bnb_8bit", 2)
    assert (spec.gradient_checkpointing, spec.max_grad_norm) == (True, 0.5)
    assert (spec.freeze, spec.num_labels, spec.padded) == ("1", 5, False)
    assert spec.problem_type == "multi_label_classification"
    assert spec_of(config_only, task="regression").num_labels == 1
    assert spec_of(config_only, adafactor=True).optim == "adafactor"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": True, "fp16": True}, "exclude each other"),
        ({"bf16": True, "dtype": "bfloat16"}, "choose one"),
        ({"torch_compile": True}, "torch_compile changes the memory"),
        ({"lerning_rate": 1.0}, "Did you mean 'learning_rate'"),
        ({"optim": "adamw_tortch"}, "Did you mean 'adamw_torch'"),
        ({"max_length": 129}, "max_length 129 is beyond the 128 positions"),
        ({"task": "auto"}, "one of single_label, multi_label, regression"),
        ({"batch_size": 0}, "the batch size is 0; it must be at least 1"),
        ({"freeze": "encoder", "lora": 4}, "leave --freeze out"),
    ],
)
def test_a_flag_that_cannot_be_priced_is_refused(
    config_only: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(config_only, **options)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no model given"),
        (["--model", "CONFIG", "--gpu", "RTX 9999"], "no card 'RTX 9999' is known"),
        (["--model", "CONFIG", "--timeline", "no/folder/t.html"], "cannot write the timeline"),
        (["--model", "./nowhere"], "there is no model folder ./nowhere"),
        (["--model", "CONFIG", "--bath-size", "3"], "Did you mean --batch-size?"),
    ],
)
def test_wrong_input_is_one_sentence(
    config_only: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code = run(["estimate", *(str(config_only) if word == "CONFIG" else word for word in words)])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert sentence in captured.err
    assert len(without_waits(captured.err).splitlines()) == 1


def test_cpu_is_no_card() -> None:
    assert device_for("cpu") is None
    card = device_for("T4")
    assert card is not None
    assert card.name == "T4 16GB"
    assert device_for(card) is card


def test_the_tables_are_said_and_aligned_in_chinese(
    config_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--model", str(config_only), "--gpu", "T4", "--bf16", "--freeze", "embeddings"]
    assert run(["estimate", *words, "--lang", "zh"]) == 0
    shown = capsys.readouterr()
    assert "注意：T4 16GB 没有 bf16 单元" in shown.err
    lines = shown.out.splitlines()
    assert re.fullmatch(r"[\d,]+ 个参数，其中 [\d,]+ 个参与训练", lines[0])
    assert lines[1].startswith("放得下：T4 16GB，")
    assert lines[2] == "CUDA 上下文 151 到 381 MiB，未实测：按上限计算"
    assert lines[5].startswith("一步的峰值  ")
    rows = [
        line for line in lines if line.startswith(("组成部分", "权重", "优化器", "CUDA 上下文  "))
    ]
    assert len(rows) == 4
    assert len({cell_len(line.rstrip()) for line in rows}) == 1
    phases = [line for line in lines if line.startswith(("阶段", "训练", "评估", "保存", "续训"))]
    assert len(phases) == 5
    assert len({cell_len(line.rstrip()) for line in phases}) == 1
    assert max(map(cell_len, lines)) <= 80


def test_a_card_that_was_only_assumed_is_said_in_chinese(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", "--model", str(config_only), "--lang", "zh"]) == 0
    assert "本机没有显卡，请用 --gpu 指定你的显卡" in capsys.readouterr().out
