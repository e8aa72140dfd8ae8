"""Every architecture `estimate` knows is planned for a card, and trained to a model that loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from memfit.cli import run
from memfit.engine.micro_batches import MicroBatching
from memfit.memory.cards import find_card
from memfit.planner.price import Pricer
from memfit.planner.recipes import recipes_for
from memfit.planner.search import plan_for
from memfit.planner.task import Task
from memfit.strategies import LowBitAdamW, find
from memfit.units import Budget
from sentences import write_short_reviews

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.usefixtures("undrawn"),
]

CARD = find_card("RTX 3060")
WIDTH = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
DEPTH = {"num_hidden_layers": 2, "max_position_embeddings": 64}
SHARED = {"num_key_value_heads": 2, "head_dim": 8}
ENCODER: dict[str, Any] = {**WIDTH, **DEPTH}
DECODER: dict[str, Any] = {**WIDTH, **DEPTH, **SHARED}
# Tiny, with what makes each its own: grouped heads, windows, relative positions, shared layers.
KINDS: dict[str, dict[str, Any]] = {
    "albert": {**ENCODER, "embedding_size": 16},
    "bart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
             "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "bert": ENCODER,
    "camembert": ENCODER,
    "deberta-v2": {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                   "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "electra": {**ENCODER, "embedding_size": 16},
    "ernie": ENCODER,
    "gemma2": DECODER,
    "gemma3_text": DECODER,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": DECODER,
    "mistral": DECODER,
    "modernbert": {**ENCODER, "num_hidden_layers": 3, "global_attn_every_n_layers": 3},
    "mpnet": ENCODER,
    "opt": {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen2": DECODER,
    "qwen3": DECODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
}  # fmt: skip


def config_of(kind: str, vocabulary: int, **more: Any) -> Any:
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    tokens |= {"cls_token_id": 2, "sep_token_id": 3, "decoder_start_token_id": 2}
    return AutoConfig.for_model(kind, vocab_size=vocabulary, **tokens, **{**KINDS[kind], **more})


def task_of(config: Any) -> Task:
    config.num_labels, config.problem_type = 2, "single_label_classification"
    args = transformers.TrainingArguments(
        "unused", per_device_train_batch_size=8, report_to="none", use_cpu=True
    )
    return Task(config=config, lengths=tuple(range(8, 33)) * 2, args=args)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_priced_on_a_card(kind: str) -> None:
    """At its real size, which is what the configuration's defaults are; the tiny ones train."""
    # Two stacks of layers are traced whole, so there are few.
    fewer = {"encoder_layers": 2, "decoder_layers": 2} if kind == "bart" else {}
    config = AutoConfig.for_model(kind, **fewer)
    config.pad_token_id = config.pad_token_id or 0
    task = replace(task_of(config), card=CARD)
    pricer = Pricer(task)
    recipes = recipes_for(task, pricer.tracer).recipes
    recipe = next(one for one in recipes if find(one.strategies, LowBitAdamW))
    price = pricer.price(recipe.strategies, MicroBatching())
    assert price.device_bytes > price.peak.allocated_bytes > 0
    assert price.step_seconds > 0
    assert price.counts.half_flops > price.counts.half_attention_flops >= 0
    assert not pricer.guessed


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_short_reviews(tmp_path_factory.mktemp("reviews") / "reviews.csv", 24)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_to_a_model_that_loads(
    tmp_path: Path, tiny_model_dir: Path, table: Path, kind: str
) -> None:
    # Some families add tokens of their own to any tokenizer.
    vocabulary = len(AutoTokenizer.from_pretrained(tiny_model_dir)) + 8
    torch.manual_seed(0)
    config = config_of(kind, vocabulary)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model_dir / name, tmp_path / "model" / name)
    words = ["train", str(table), "--model", str(tmp_path / "model"), "--exact", "--max-length"]
    words += ["16", "--batch-size", "8", "--epochs", "1", "--validation-split", "0.25"]
    assert run([*words, "--quiet", "--output-dir", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["plan"], "it was trained without a plan"
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    answers = trained(torch.tensor([[2, 5, 6, 3]])).logits
    assert answers.shape == (1, 2)
    assert torch.isfinite(answers).all()


def test_a_plan_names_what_it_could_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import flop_registry

    from memfit.memory.tracing import counting

    def refuses(*_: Any, **__: Any) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.convolution, refuses)
    counting._kind.cache_clear()
    try:
        config = AutoConfig.for_model("convbert", vocab_size=100, embedding_size=16, **ENCODER)
        workload, cpu = task_of(config), torch.device("cpu")
        planning = plan_for(workload.placed(Budget(bytes=10**9), cpu, exact=True))
    finally:
        counting._kind.cache_clear()
    assert [note.sentence() for note in planning.notes] == [
        "what convolution compute could not be counted, so their time is a guess from the sizes of "
        "what goes in and comes out"
    ]
