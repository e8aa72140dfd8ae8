"""The fake trace: what it knows, what it must be told, and that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

import memfit.memory
from memfit.errors import ModelError, TraceError
from memfit.memory.cards import find_card
from memfit.memory.components import Component
from memfit.memory.stock_estimate import estimate_memory
from memfit.memory.stock_step import StepSpec
from memfit.memory.tracing.fake_tensors import fake_trace
from memfit.memory.tracing.operators import CudaKernels

CARD = find_card("T4")
BERT = {
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def test_weights_of_any_size_cost_no_memory() -> None:
    with fake_trace() as tracker:
        weight = nn.Parameter(torch.empty(100_000, 100_000))
        (weight.sum() * 2).backward()
        assert tracker.live_bytes == 2 * 40_000_000_000
        assert weight.grad is not None


def test_what_follows_from_the_batch_alone_has_its_true_values() -> None:
    with fake_trace():
        mask = torch.ones(2, 4, dtype=torch.long)
        mask[1, 3] = 0
        assert not bool(mask.all())
        assert mask.sum(1).tolist() == [4, 3]
        hidden = torch.empty(2, 4, 8)
        assert hidden[mask.bool()].shape == (7, 8)


class PickyConfig(PretrainedConfig):
    model_type = "picky"
    hidden_size = 8
    num_hidden_layers = 1
    vocab_size = 50


class Picker(nn.Module):
    """Keeps the tokens it likes: how many depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.nonzero(self.score(x).flatten() > 0).flatten()
        return x.flatten(0, 1)[chosen]


class PickyForSequenceClassification(PreTrainedModel):
    config_class = PickyConfig
    base_model_prefix = "picky"

    def __init__(self, config: PickyConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.picker = Picker()
        self.head = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        del attention_mask
        pooled = self.picker(self.embeddings(input_ids)).mean(0, keepdim=True)
        logits = self.head(pooled.expand(len(input_ids), -1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(scope="module", autouse=True)
def picky() -> None:
    AutoConfig.register("picky", PickyConfig)
    AutoModelForSequenceClassification.register(PickyConfig, PickyForSequenceClassification)


@pytest.fixture
def supplied() -> Iterator[None]:
    memfit.memory.register_operator(
        "aten::nonzero", lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.long)
    )
    yield
    memfit.memory.unregister_operator("aten::nonzero")


def test_an_operator_that_depends_on_values_is_named_with_its_module() -> None:
    with pytest.raises(TraceError, match=r"aten::nonzero in picker.*register_operator") as caught:
        estimate_memory(StepSpec(config={"model_type": "picky"}, rows=3, length=5), CARD)
    assert caught.value.exit_code == 1


@pytest.mark.usefixtures("supplied")
def test_a_supplied_operator_lets_the_architecture_be_traced() -> None:
    found = estimate_memory(StepSpec(config={"model_type": "picky"}, rows=3, length=5), CARD)
    assert found.parameters == 50 * 8 + 9 + 18
    gathered = [e for e in found.events if e.birth and e.nbytes == 512]  # 15 * 8 * 4, in a block
    assert any(e.module == "picker" for e in gathered)


def test_a_shape_that_does_not_come_out_is_an_error_with_a_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {**BERT, "hidden_size": 30, "num_attention_heads": 2, "max_position_embeddings": 4}
    with pytest.raises(TraceError, match="BertForSequenceClassification cannot be traced"):
        estimate_memory(StepSpec(config=config, rows=2, length=8), CARD)
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"hidden_size": 8}}, "no model_type"),
        ({"config": {"model_type": "no-such-model"}}, "knows no model_type 'no-such-model'"),
        ({"config": {"model_type": "clip"}}, "cannot build a classifier of clip"),
        (
            {"config": {**BERT, "model_type": "albert"}, "gradient_checkpointing": True},
            "does not support gradient checkpointing",
        ),
        ({"attn_implementation": "flash_attention_2"}, "half precision only"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(changes: dict[str, Any], words: str) -> None:
    step = {"config": BERT, "rows": 2, "length": 8, **changes}
    with pytest.raises(ModelError, match=words):
        estimate_memory(StepSpec(**step), CARD)


def test_nothing_of_the_trace_is_left_behind() -> None:
    before = _dropout_node(), _norm_dtype()
    step = StepSpec(
        config=BERT, rows=2, length=8, precision="bf16", attn_implementation="flash_attention_2"
    )
    estimate_memory(step, find_card("A10"))
    assert (_dropout_node(), _norm_dtype()) == before == ("MulBackward0", torch.bfloat16)
    assert "memfit_unpadded" not in AttentionInterface().valid_keys()


def test_real_tensors_beside_a_trace_are_computed_as_ever() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 4, 8)
    attend = nn.functional.scaled_dot_product_attention
    expected = attend(query, query, query)
    with CudaKernels((9, 0), 132, autocast=True).installed():
        assert torch.equal(attend(query, query, query), expected)
        assert torch.allclose(torch.softmax(query, -1), query.log_softmax(-1).exp())
        kept = nn.functional.dropout(torch.ones(1000), 0.5)
        assert set(kept.tolist()) == {0.0, 2.0}


def _dropout_node() -> str:
    out = nn.functional.dropout(torch.ones(3, requires_grad=True), 0.5)
    assert out.grad_fn is not None
    return out.grad_fn.name()


def _norm_dtype() -> torch.dtype:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.layer_norm(torch.ones(2, 4, dtype=torch.bfloat16), (4,)).dtype


def test_autograd_adds_two_gradients_in_place_as_it_does_for_plain_tensors() -> None:
    def births(kernels: CudaKernels | None) -> int:
        with fake_trace(kernels) as tracker:
            x = torch.empty(64, requires_grad=True)
            y = x * 2
            loss = (y.sin() + y.cos()).sum()
            start = tracker.position
            with tracker.accounting(Component.ACTIVATIONS):
                loss.backward()
            return sum(e.nbytes == 256 for e in tracker.events(start) if e.birth)

    assert births(None) - births(CudaKernels((9, 0), 132)) == 1
