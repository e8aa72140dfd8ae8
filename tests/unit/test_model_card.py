"""The model card: the run's figures are in it, and no text, path, tag or token."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from memfit.config.files import write_json
from memfit.errors import ConfigError
from memfit.i18n import speaking
from memfit.memory.components import Component, MemoryPeak
from memfit.records.evaluation import ClassRow, Evaluation, Mistake
from memfit.records.export_results import Export, Variant
from memfit.records.results import MemorySummary, RunSummary, write_evaluation, write_summary
from memfit.report.model_card import AuthorsWords, card_for, has_licence, model_card
from memfit.report.page import write_report

SECRET_TEXT = "房間很髒，電話是0912345678"
PLAN = """version = 1
fidelity = "rounding"
[workload]
model = "/home/anna/models/macbert"
rows = 90
[strategies]
packing = {}
checkpointing = {layers = 9}
[reasons]
packing = "texts are 40 % of their padded length"
"""


def peak(activations: int) -> MemoryPeak:
    parts = {Component.WEIGHTS: 2**30, Component.ACTIVATIONS: activations}
    total = sum(parts.values())
    return MemoryPeak(parts, total, total, total + 2**20)


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "model": "hfl/chinese-macbert-large",
        "task": "single_label",
        "labels": ("負評", "正評"),
        "metrics": {"accuracy": 0.91234, "f1": 0.90006},
        "averaging": "binary",
        "positive": "正評",
        "training": {"steps": 27, "epochs": 2.0, "learning_rate": 2e-5, "parameters": 325_524_482,
                     "optim": "adamw_torch", "effective_batch": 32, "seed": 42},
        "data": {"rows_read": 102, "dropped_no_text": 1, "dropped_no_label": 1, "train_rows": 90,
                 "validation_rows": 10, "duplicates_across_split": 3, "text_column": "review",
                 "train_class_counts": {"負評": 30, "正評": 60},
                 "validation_class_counts": {"負評": 3, "正評": 7}},
        "lengths": {"p50": 21, "p90": 80, "max": 301, "max_length": 128, "cut_rows": 4},
        "seconds": {"train": 75.0, "total": 80.2},
        "memory": MemorySummary(4_000_000_000, peak(2**31), peak(2**29)),
        "device": "NVIDIA GeForce RTX 3060",
        "versions": {"memfit": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    }  # fmt: skip
    return RunSummary(**{**values, **changes})


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "private folder"
    shutil.copytree(tiny_model_dir, folder)
    write_summary(folder, summary())
    rows = (ClassRow("負評", 0.8, 0.7, 0.75, 3), ClassRow("正評", 0.9, 1.0, 0.95, 7))
    wrong = (Mistake(SECRET_TEXT, "負評", "正評", 0.99),)
    write_evaluation(folder, Evaluation("single_label", 10, {}, classes=rows), wrong)
    return folder


def test_the_figures_of_the_run_are_in_the_card(run: Path) -> None:
    card = model_card(run, "anna/reviews", "apache-2.0")
    for line in (
        "| accuracy | 0.9123 |",
        "| F1 | 0.9001 |",
        "| 正評 | 0.9000 | 1.0000 | 0.9500 | 7 |",
        "| 正評 | 60 | 7 |",
        "| rows to train on | 90 |",
        "| rows left out, without text or label | 2 |",
        "| tokens of a text: median / 90 % / longest | 21 / 80 / 301 |",
        "| base model | `hfl/chinese-macbert-large` |",
        "| parameters | 325,524,482 |",
        "| learning rate | 2e-05 |",
        "The budget was 4.00 GB (3.73 GiB).",
        "| at the peak | predicted | measured |",
        "| activations | 2.00 GiB | 512.0 MiB |",
        "| **on the device** | 3.00 GiB | 1.50 GiB |",
        "| time training | 1 min 15 s |",
        "Trained and uploaded with memfit (memfit 0.1.0, torch 2.13.0).",
    ):
        assert line in card.splitlines(), line
    assert 'model="anna/reviews"' in card


def exported(folder: Path) -> Export:
    def variant(name: str, **changes: Any) -> Variant:
        return Variant(
            name=name, alone_milliseconds=12.34, batched_milliseconds=5.678, metric=0.9, **changes
        )

    int8 = variant("onnx-int8", scheme="per channel", size_bytes=2**20, changed_answers=2,
                   logits_off=0.1, file="onnx/model_int8.onnx")  # fmt: skip
    plain = variant("torch", size_bytes=2**22, changed_answers=0, logits_off=0.0)
    return Export(
        folder=folder, metric="f1", rows=1234, scored_on="/home/anna/secret.csv",
        variants=(plain, int8), refused="",
    )  # fmt: skip


def test_exported_files_are_in_the_card_and_the_report(run: Path) -> None:
    assert "Exported files" not in model_card(run, "anna/reviews", "mit")
    write_json(run / "export.json", exported(run).to_dict())
    card = model_card(run, "anna/reviews", "mit")
    assert "| onnx-int8 (per channel) | 1.0 MiB | 12.3 | 5.68 | 0.9000 | 2 of 1,234 |" in card
    assert "secret" not in card
    page = write_report(run).read_text(encoding="utf-8")
    assert "onnx-int8 (per channel)" in page
    not_written = replace(exported(run).variants[1], file="")
    made = replace(
        exported(run), variants=(exported(run).variants[0], not_written), refused="too bad"
    )
    write_json(run / "export.json", made.to_dict())
    assert "Exported files" not in model_card(run, "anna/reviews", "mit")
    assert "too bad" in write_report(run).read_text(encoding="utf-8")
    for broken in ("{", "[]", '{"variants": 3}', '{"rows": "x", "metric": "", "variants": []}'):
        (run / "export.json").write_text(broken)
        assert "Exported files" not in write_report(run).read_text(encoding="utf-8")


def test_the_hub_can_read_the_front_matter(run: Path) -> None:
    data = ModelCard(model_card(run, "anna/reviews", "apache-2.0")).data
    assert data.license == "apache-2.0"
    assert data.base_model == "hfl/chinese-macbert-large"
    assert data.pipeline_tag == "text-classification"
    assert data.metrics == ["accuracy", "f1"]
    assert "memfit" in data.tags


def test_no_text_and_no_path_is_in_the_card(run: Path) -> None:
    write_summary(run, summary(model=str(run)))
    (run / "plan.toml").write_text(PLAN, encoding="utf-8")
    card = model_card(run, "anna/reviews", "mit")
    assert SECRET_TEXT not in card
    assert "/home/anna" not in card
    assert str(run) not in card
    assert run.name not in card
    assert "| base model | a model from a local folder |" in card
    assert "base_model" not in card


def test_the_plan_is_in_the_card(run: Path) -> None:
    (run / "plan.toml").write_text(PLAN, encoding="utf-8")
    lines = model_card(run, "anna/reviews", "mit").splitlines()
    assert "What it does to the result: rounding." in lines
    assert "| packing | – | texts are 40 % of their padded length |" in lines
    assert "| recomputing layers | layers 9 | – |" in lines


def test_labels_cannot_break_out_of_their_cell(run: Path) -> None:
    name = "a|b\n# heading<script>"
    write_summary(run, summary(data={"train_class_counts": {name: 5}}, labels=(name,)))
    card = model_card(run, "anna/reviews", "mit")
    assert r"| a\|b # heading&lt;script&gt; | 5 | 0 |" in card.splitlines()
    assert "<script" not in card
    assert "\n# heading" not in card


def test_a_folder_without_a_run_has_a_card_of_what_is_known(tiny_model_dir: Path) -> None:
    card = model_card(tiny_model_dir, "anna/reviews", "mit")
    assert "Gives a text one of these labels: 負評, 正評." in card
    assert "## Results" not in card
    assert card.endswith("Trained and uploaded with memfit.\n")


def test_modelscope_is_used_through_its_own_client(run: Path) -> None:
    write_summary(run, summary(model="modelscope:damo/bert"))
    card = model_card(run, "anna/reviews", "mit", to="modelscope")
    assert 'HubApi().download_repo("anna/reviews", "model")' in card
    assert "| base model | `damo/bert` (ModelScope) |" in card
    assert "base_model" not in card


def test_use_and_limits_are_the_authors_or_left_to_fill_in(run: Path) -> None:
    rows = (ClassRow("負|評", 0.8, 0.3, 0.75, 3), ClassRow("正評", 0.9, 1.0, 0.95, 7))
    write_evaluation(run, Evaluation("single_label", 10, {}, classes=rows))
    card = model_card(run, "anna/reviews", "mit")
    assert "## Intended use\n\n*To be filled in: which texts this model is for" in card
    for line in (
        "- A text that none of the labels fits gets one of them all the same.",
        "- It was measured on 10 rows only, of the kind it was trained on",
        "- What follows the first 128 tokens of a text is not read.",
        "- Of the texts of class 負\\|評 it finds 30%.",
        "\n\n*To be filled in: what it must not be used for",
    ):
        assert line in card, line
    assert "class 正評" not in card
    words = AuthorsWords("Hotel reviews.", "Not for jokes.")
    card = card_for(run, "anna/reviews", "mit", "hub", words)
    assert "## Intended use\n\nHotel reviews.\n" in card
    assert "\n\nNot for jokes.\n" in card
    assert "To be filled in" not in card


def test_a_card_somebody_wrote_is_kept_and_gets_the_licence(run: Path) -> None:
    (run / "README.md").write_text("---\nlanguage: zh\n---\n\nMine.\n", encoding="utf-8")
    assert not has_licence(run)
    with pytest.raises(ConfigError, match="--licence"):
        card_for(run, "anna/reviews", None, "hub")
    card = card_for(run, "anna/reviews", "MIT", "hub")
    assert "Mine." in card
    assert "## Results" not in card
    assert (ModelCard(card).data.license, ModelCard(card).data.language) == ("mit", "zh")
    (run / "README.md").write_text(card, encoding="utf-8")
    assert has_licence(run)
    assert card_for(run, "anna/reviews", None, "hub") == card


def test_a_card_a_program_wrote_is_made_anew(run: Path) -> None:
    made = model_card(run, "anna/reviews", "mit")
    (run / "README.md").write_text(made, encoding="utf-8")
    assert not has_licence(run)
    write_summary(run, summary(metrics={"accuracy": 0.5}))
    assert "| accuracy | 0.5000 |" in card_for(run, "anna/reviews", "mit", "hub")


def test_the_card_speaks_chinese_and_its_metadata_do_not(run: Path) -> None:
    (run / "plan.toml").write_text(PLAN, encoding="utf-8")
    with speaking("zh"):
        card = model_card(run, "anna/reviews", "apache-2.0")
    english = model_card(run, "anna/reviews", "apache-2.0")
    for line in (
        "给文本打上以下标签之一：負評, 正評。",
        "在 10 行验证数据上。F1、精确率与召回率针对类别“正評”。",
        "| 准确率 | 0.9123 |",
        "| 类别 | 精确率 | 召回率 | F1 | 行数 |",
        "| 训练的行数 | 90 |",
        "| 每条文本的词元数：中位数 / 90 % / 最长 | 21 / 80 / 301 |",
        "| 文本截断于 | 128 个词元 |",
        "| 基础模型 | `hfl/chinese-macbert-large` |",
        "| 学习率 | 2e-05 |",
        "预算是 4.00 GB (3.73 GiB)。",
        "| 峰值时 | 预测 | 实测 |",
        "| 激活 | 2.00 GiB | 512.0 MiB |",
        "| 训练用时 | 1 分 15 秒 |",
        "对结果的影响：仅舍入。",
    ):
        assert line in card.splitlines(), line
    headings = [line[3:] for line in card.splitlines() if line.startswith("## ")]
    assert headings == [
        "使用", "适用范围", "局限", "结果", "数据", "训练", "内存", "时间", "方案",
    ]  # fmt: skip
    assert ModelCard(card).data.to_dict() == ModelCard(english).data.to_dict()
    rows = [text.count("\n|") for text in (card, english)]
    assert rows[0] == rows[1] > 30


def test_a_card_made_in_chinese_is_made_anew_too(run: Path) -> None:
    with speaking("zh"):
        (run / "README.md").write_text(model_card(run, "anna/reviews", "mit"), encoding="utf-8")
    assert not has_licence(run)
    assert card_for(run, "anna/reviews", "mit", "hub") == model_card(run, "anna/reviews", "mit")
