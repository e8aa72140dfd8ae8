"""Packed and padded must be the same computation, in every family that can be packed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from memfit.engine.packed_batch import PackedBatch, weighted_loss
from memfit.strategies.packing.packed_model import PackedModel, packing_problem

LENGTHS = (3, 29, 7, 16, 1, 11, 29)
POSITIONS = 40  # fewer than the packed batch has tokens
COMMON: dict[str, Any] = {"vocab_size": 97, "num_labels": 3}
BERT_LIKE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ALBERT = {
    **BERT_LIKE,
    "embedding_size": 16,
    "num_hidden_layers": 3,
    "inner_group_num": 2,
    "classifier_dropout_prob": 0.0,
}
ROBERTA_LIKE = {**BERT_LIKE, "type_vocab_size": 1, "pad_token_id": 1}
DISTILBERT = {
    **COMMON,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 48,
    "max_position_embeddings": POSITIONS,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
MODERNBERT: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 4,  # layers 0 and 3 attend globally, 1 and 2 within the window
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT_LIKE),
    "ernie": ("Ernie", {**BERT_LIKE, "use_task_id": True, "task_type_vocab_size": 3}),
    "electra": ("Electra", {**BERT_LIKE, "embedding_size": 16}),
    "roberta": ("Roberta", ROBERTA_LIKE),
    "xlm-roberta": ("XLMRoberta", ROBERTA_LIKE),
    "camembert": ("Camembert", ROBERTA_LIKE),
    "albert": ("Albert", ALBERT),
    "distilbert": ("DistilBert", DISTILBERT),
    "modernbert-mean": ("ModernBert", {**MODERNBERT, "classifier_pooling": "mean"}),
    "modernbert-cls": ("ModernBert", {**MODERNBERT, "classifier_pooling": "cls"}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def build(family: str, **changes: Any) -> Any:
    """A tiny model of a family, its weights large enough for texts to differ."""
    prefix, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{prefix}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def padded_batch(
    model: Any, *, width: int | None = None, left: bool = False, pairs: bool = False
) -> dict[str, Tensor]:
    """Texts of `LENGTHS` as a collator would give them."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    width = width or max(LENGTHS)
    pad = config.pad_token_id
    ids = torch.full((len(LENGTHS), width), pad)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        cells = slice(width - length, width) if left else slice(0, length)
        ids[row, cells] = torch.randint(5, config.vocab_size, (length,), generator=generator)
        mask[row, cells] = 1
        if pairs:
            types[row, cells][length // 2 :] = 1
    batch = {"input_ids": ids, "attention_mask": mask}
    if pairs:
        batch["token_type_ids"] = types
    batch["labels"] = torch.arange(len(LENGTHS)) % 3
    return batch


def step(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients of one step."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), output.loss.detach(), gradients


def largest(gradients: dict[str, Tensor]) -> float:
    return max(float(g.abs().max()) for g in gradients.values())


def assert_same_step(
    first: tuple[Tensor, Tensor, dict[str, Tensor]],
    second: tuple[Tensor, Tensor, dict[str, Tensor]],
    tolerance: float = 1e-5,
) -> None:
    """Logits and loss within the tolerance, gradients within that share of the largest."""
    assert torch.allclose(first[0], second[0], atol=tolerance, rtol=tolerance)
    assert abs(float(first[1] - second[1])) <= tolerance
    assert first[2].keys() == second[2].keys()
    scale = largest(first[2])
    assert scale > 0
    worst = {n: float((g - second[2][n]).abs().max()) / scale for n, g in first[2].items()}
    assert max(worst.values()) <= tolerance, max(worst, key=lambda name: worst[name])


def compare(model: Any, batch: dict[str, Tensor], tolerance: float = 1e-5) -> PackedBatch:
    """Assert that the packed step equals the padded one; gives the packed batch back."""
    expected = step(model, batch)
    with PackedModel(model) as packer:
        flat = packer.pack(batch)
        assert_same_step(expected, step(model, flat.inputs()), tolerance)
    return flat


@every_family
def test_logits_and_gradients_equal_the_padded_ones(family: str) -> None:
    model = build(family).train()
    flat = compare(model, padded_batch(model))
    assert flat.total_tokens == sum(LENGTHS) > POSITIONS


@every_family
def test_padding_to_a_fixed_length_changes_nothing(family: str) -> None:
    model = build(family).train()
    flat = compare(model, padded_batch(model, width=36))
    assert flat.total_tokens == sum(LENGTHS)


@every_family
def test_left_padding_gives_what_right_padding_gives(family: str) -> None:
    model = build(family).train()
    expected = step(model, padded_batch(model))
    with PackedModel(model) as packer:
        flat = packer.pack(padded_batch(model, left=True))
        assert_same_step(expected, step(model, flat.inputs()))


def between(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with a padded cell in the middle of its longest text."""
    mask = batch["attention_mask"].clone()
    mask[int(mask.sum(dim=1).argmax()), mask.shape[1] // 2] = 0
    return {**batch, "attention_mask": mask}


@every_family
def test_padding_that_is_not_behind_the_texts_has_the_part_it_has_unpacked(family: str) -> None:
    model = build(family).train()
    for batch in (padded_batch(model, left=True), between(padded_batch(model))):
        expected = step(model, batch)
        with PackedModel(model) as packer:
            assert_same_step(expected, step(model, dict(packer.inputs_of(batch))))
            packer.pack_inside()
            assert_same_step(expected, step(model, batch))


@pytest.mark.parametrize("family", ["bert", "ernie", "electra", "albert"])
def test_pairs_keep_their_token_types(family: str) -> None:
    model = build(family).train()
    pairs = padded_batch(model, pairs=True)
    compare(model, pairs)
    without = {name: column for name, column in pairs.items() if name != "token_type_ids"}
    assert not torch.allclose(model(**pairs).logits, model(**without).logits, atol=1e-3)


@every_family
def test_dummy_tokens_and_rows_change_neither_loss_nor_gradient(family: str) -> None:
    model = build(family).train()
    batch = padded_batch(model)
    expected = step(model, batch)
    with PackedModel(model) as packer:
        flat = packer.pack(batch, pad_to_tokens=160, pad_to_rows=12, max_seqlen=32)
        logits, loss, gradients = step(model, flat.inputs())
        assert flat.total_tokens == 160
        assert logits.shape == (12, 3)
        assert_same_step(expected, (logits[: flat.real_rows], loss, gradients))
        model.zero_grad()
        logits = model(**flat.inputs(labels=False)).logits
        assert flat.labels is not None
        loss = weighted_loss(logits, flat.labels, flat.row_weight / flat.real_rows)
        loss.backward()
        again = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same_step(expected, (logits[: flat.real_rows].detach(), loss.detach(), again))


@every_family
def test_dummy_rows_after_a_bucket_that_is_exactly_full(family: str) -> None:
    """They begin where the tokens end, and must point at a token that exists."""
    model = build(family).train()
    batch = padded_batch(model)
    expected = step(model, batch)
    with PackedModel(model) as packer:
        flat = packer.pack(batch, pad_to_tokens=sum(LENGTHS), pad_to_rows=10, max_seqlen=32)
        logits, loss, gradients = step(model, flat.inputs())
    assert_same_step(expected, (logits[:7], loss, gradients))


@every_family
def test_bfloat16_agrees_within_its_own_rounding(family: str) -> None:
    """Both are compared with fp32: packing may add no error to what bf16 itself costs."""
    exact = build(family).train()
    batch = padded_batch(exact)
    logits, _, gradients = step(exact, batch)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    padded = step(model, batch)
    with PackedModel(model) as packer:
        flat = step(model, packer.pack(batch).inputs())

    def gradient_error(other: dict[str, Tensor]) -> float:
        squares = [(other[n].float() - g).square().sum() for n, g in gradients.items()]
        return float(torch.stack(squares).sum().sqrt())

    scale = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
    assert gradient_error(flat[2]) <= 1.25 * gradient_error(padded[2]) + 1e-3 * scale
    assert float((flat[0].float() - logits).abs().max()) <= 0.03 * float(logits.abs().max())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "albert"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_text_boundaries(
    family: str, reentrant: bool
) -> None:
    model = build(family).train()
    batch = padded_batch(model)
    expected = step(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with PackedModel(model) as packer:
        assert_same_step(expected, step(model, packer.pack(batch).inputs()))


def test_two_checkpointed_forwards_before_their_backwards_keep_their_own_texts() -> None:
    model = build("bert").train()
    batch = padded_batch(model)
    halves = [{n: c[:3] for n, c in batch.items()}, {n: c[3:] for n, c in batch.items()}]
    expected = [step(model, half) for half in halves]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with PackedModel(model) as packer:
        losses = [model(**packer.pack(half).inputs()).loss for half in halves]
        for loss, (_, _, gradients) in zip(losses, expected, strict=True):
            model.zero_grad()
            loss.backward()
            scale = largest(gradients)
            for name, parameter in model.named_parameters():
                assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-5 * scale


LORA_TARGETS = {
    "bert": ["query", "value"],
    "roberta": ["query", "value"],
    "albert": ["query", "value"],
    "distilbert": ["q_lin", "v_lin"],
    "modernbert-mean": ["Wqkv"],
}


@pytest.mark.parametrize("family", LORA_TARGETS)
def test_lora_adapters_get_the_same_gradients(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        r=4, target_modules=LORA_TARGETS[family], task_type="SEQ_CLS", init_lora_weights=False
    )
    torch.manual_seed(0)
    model = get_peft_model(build(family), adapter).train()
    assert packing_problem(model) == ""
    compare(model, padded_batch(model.get_base_model()))


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        ("multi_label_classification", 3, torch.rand(len(LENGTHS), 3).round()),
        ("regression", 1, torch.linspace(-1, 1, len(LENGTHS))),
        ("regression", 3, torch.linspace(-1, 1, 3 * len(LENGTHS)).view(-1, 3)),
    ],
)
def test_other_losses_are_weighted_by_real_rows(
    problem: str, num_labels: int, labels: Tensor
) -> None:
    model = build("bert", num_labels=num_labels, problem_type=problem).train()
    batch = {**padded_batch(model), "labels": labels}
    compare(model, batch)
    logits, loss, gradients = step(model, batch)
    with PackedModel(model) as packer:
        flat = packer.pack(batch, pad_to_rows=9, pad_to_tokens=128)
        model.zero_grad()
        padded_logits = model(**flat.inputs(labels=False)).logits
        assert flat.labels is not None
        ours = weighted_loss(padded_logits, flat.labels, flat.row_weight / 7, problem)
        ours.backward()
        again = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same_step(
            (logits, loss, gradients), (padded_logits[:7].detach(), ours.detach(), again)
        )


@every_family
def test_padded_batches_still_go_the_stock_way_while_packed(family: str) -> None:
    model = build(family).eval()
    batch = padded_batch(model)
    expected = model(**batch).logits
    with PackedModel(model):
        assert torch.equal(model(**batch).logits, expected)


@every_family
def test_eager_attention_is_packed_and_falls_back_to_itself(family: str) -> None:
    model = build(family, attn_implementation="eager").train()
    assert model.config._attn_implementation == "eager"
    batch = padded_batch(model)
    compare(model, batch)
    expected = model(**batch).logits
    with PackedModel(model):
        assert torch.equal(model(**batch).logits, expected)


@every_family
def test_remove_restores_the_stock_model_exactly(family: str) -> None:
    model = build(family).eval()
    batch = padded_batch(model)
    expected = model(**batch).logits
    configs = {name: id(module.config) for name, module in _with_config(model)}
    hooks = _hooks(model)
    packer = PackedModel(model)
    model(**packer.pack(batch).inputs())
    assert _hooks(model) > hooks
    packer.remove()
    packer.remove()
    assert torch.equal(model(**batch).logits, expected)
    assert {name: id(module.config) for name, module in _with_config(model)} == configs
    assert _hooks(model) == hooks


@every_family
def test_a_second_model_of_the_same_config_object_is_not_touched(family: str) -> None:
    prefix, settings = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    make = getattr(transformers, f"{prefix}ForSequenceClassification")
    first, second = make(config), make(config).eval()
    assert first.config is second.config
    batch = padded_batch(second)
    expected = second(**batch).logits
    with PackedModel(first):
        assert torch.equal(second(**batch).logits, expected)
        assert second.config._attn_implementation == "sdpa"
        assert first.config._attn_implementation == "sdpa"  # nothing of ours is ever saved


@every_family
def test_every_family_is_recognised(family: str) -> None:
    assert packing_problem(build(family)) == ""


def _with_config(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "config")]


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
