"""What is packed and what is refused, with its reason; and what packing does to a model's mode."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.engine.packed_batch import pack
from memfit.errors import ModelError
from memfit.strategies.packing import packed_model
from memfit.strategies.packing.packed_model import (
    FAMILIES,
    PackedFamily,
    PackedModel,
    pack_spec,
    packing_problem,
)

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}


def bert(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SMALL, **changes})
    return transformers.BertForSequenceClassification(config)


def batch() -> dict[str, Tensor]:
    mask = torch.arange(9) < torch.tensor([4, 9, 6])[:, None]
    ids = torch.arange(27).view(3, 9) + 5
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": torch.tensor([0, 1, 0]),
    }


def qwen() -> Any:
    config = transformers.Qwen2Config(**SMALL, num_key_value_heads=1, pad_token_id=0)
    return transformers.Qwen2ForSequenceClassification(config)


REFUSALS = {
    "MPNet": (
        lambda: transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SMALL)),
        "MPNet adds relative position biases and silently ignores text boundaries",
    ),
    "DeBERTa-v2": (
        lambda: transformers.DebertaV2ForSequenceClassification(
            transformers.DebertaV2Config(**SMALL)
        ),
        "DeBERTa's attention mixes in relative positions",
    ),
    "Qwen2": (qwen, "qwen2 is a decoder; only encoders are packed so far"),
    "an encoder without a rule": (
        lambda: transformers.RoFormerForSequenceClassification(
            transformers.RoFormerConfig(**SMALL)
        ),
        "no packing rule for the model type 'roformer'",
    ),
    "another head": (
        lambda: transformers.BertForTokenClassification(transformers.BertConfig(**SMALL)),
        "BertForTokenClassification has no sequence classification head",
    ),
    "BERT as a decoder": (lambda: bert(is_decoder=True), "its config says is_decoder"),
    "no transformers model": (lambda: nn.Linear(2, 2), "Linear is no transformers model"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # DeBERTa's own
@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_packed_is_refused_with_a_reason(name: str) -> None:
    build, reason = REFUSALS[name]
    assert reason in packing_problem(build())


def test_prompt_learning_is_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(bert(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
    assert "put tokens of their own before each text" in packing_problem(model)


def test_a_rule_for_a_family_that_cannot_be_packed_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = PackedFamily(
        attention="MPNetSelfAttention", positions_skip_padding=True, token_types=False
    )
    monkeypatch.setattr(packed_model, "FAMILIES", {**FAMILIES, "mpnet": rule})
    monkeypatch.setattr(packed_model, "REFUSED", {})
    model = transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**SMALL))
    expected = "MPNetSelfAttention does not look its attention function up by name"
    assert expected in packing_problem(model)


class DropsArguments(transformers.BertForSequenceClassification):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


class PoolsItsOwnWay(transformers.BertForSequenceClassification):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        hidden = self.bert(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        mask = torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.classifier(mean)
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=logits)


class Fails(transformers.BertForSequenceClassification):
    def forward(self, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(attention_mask=attention_mask * 1, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (DropsArguments, "reached the attention in 0 of 2 layers"),
        (PoolsItsOwnWay, "packed and padded logits differ by"),
        (Fails, "a packed trial batch failed: TypeError"),
    ],
)
def test_a_changed_class_of_a_known_family_is_caught_by_trying_it(kind: Any, reason: str) -> None:
    torch.manual_seed(0)
    settings = transformers.BertConfig(**SMALL)
    assert "no sequence classifier of transformers itself" in packing_problem(kind(settings))
    # As if somebody had patched the library's own class.
    stock = transformers.BertForSequenceClassification
    model = type(stock.__name__, (kind,), {"__module__": stock.__module__})(settings)
    assert reason in packing_problem(model)
    # Whatever the trial met, the model is left as it was.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_trying_leaves_modes_and_random_numbers_alone() -> None:
    model = bert().train()
    model.bert.encoder.layer[0].eval()
    before = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert packing_problem(model) == ""
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_is_tried_in_its_own_precision(dtype: torch.dtype) -> None:
    assert packing_problem(bert().to(dtype)) == ""


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_a_model_without_weights_is_judged_by_its_family(where: str) -> None:
    with torch.device("meta") if where == "meta" else FakeTensorMode():
        model = bert()
    assert packing_problem(model) == ""


def test_the_packed_step_runs_on_fake_tensors() -> None:
    """The memory trace follows the very same step, so nothing may look at a tensor's content."""
    flat = pack(batch(), pack_spec(bert()), pad_to_rows=4, pad_to_tokens=32)
    mode = FakeTensorMode()
    inputs = {
        name: mode.from_tensor(value) if isinstance(value, Tensor) else value
        for name, value in flat.inputs().items()
    }
    with mode:
        model = bert().train()
        with PackedModel(model):
            output = model(**inputs)
            output.loss.backward()
    assert output.logits.shape == (4, 2)
    assert all(p.grad is not None for p in model.parameters())


def test_attention_dropout_drops_in_training_only_and_follows_the_seed() -> None:
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    with PackedModel(model) as packer:
        inputs = packer.pack(batch()).inputs()

        def logits(seed: int) -> Tensor:
            torch.manual_seed(seed)
            found: Tensor = model(**inputs).logits
            return found

        model.train()
        assert torch.equal(logits(1), logits(1))
        assert not torch.allclose(logits(1), logits(2), atol=1e-4)
        model.eval()
        assert torch.equal(logits(1), logits(2))


def test_checkpointing_recomputes_the_same_attention_dropout() -> None:
    """The recomputed draw must be the first one, else the gradient is of another function."""
    gradients = []
    for checkpointing in (False, True):
        model = bert(attention_probs_dropout_prob=0.5).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with PackedModel(model) as packer:
            torch.manual_seed(5)
            model(**packer.pack(batch()).inputs()).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_only_the_tokens_the_head_reads_pass_the_last_feed_forward() -> None:
    model = bert()
    seen: list[int] = []
    for layer in model.bert.encoder.layer:
        layer.intermediate.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with PackedModel(model) as packer:
        model(**packer.pack(batch()).inputs())
        assert seen == [19, 3]  # 4 + 9 + 6 tokens, then three texts
        seen.clear()
        model(**batch())
        assert seen == [9, 9]


def test_a_model_is_packed_once_at_a_time() -> None:
    model = bert()
    with PackedModel(model), pytest.raises(ValueError, match="packed already"):
        PackedModel(model)
    PackedModel(model).remove()


def test_packing_what_cannot_be_packed_raises() -> None:
    with pytest.raises(ModelError, match="Qwen2ForSequenceClassification cannot be packed"):
        PackedModel(qwen())


def test_an_error_inside_the_block_still_restores_the_model() -> None:
    model = bert()
    config = model.bert.encoder.layer[0].attention.self.config
    with contextlib.suppress(KeyError), PackedModel(model):
        raise KeyError
    assert model.bert.encoder.layer[0].attention.self.config is config


def test_a_compiled_models_inner_model_is_found() -> None:
    compiled = torch.compile(bert(), backend="eager")
    assert pack_spec(compiled).token_types  # type: ignore[arg-type]
