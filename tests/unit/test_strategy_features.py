"""A frozen encoder run once: one pass over each dataset, the same training, its refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from strategy_fixtures import (
    SEP,
    SetupTrainer,
    arguments,
    build,
    collate,
    count_calls,
    frozen,
    losses,
    rows_of,
    same_state,
    setup_of,
    state_of,
    trained,
)
from torch import nn
from torch.utils.data import IterableDataset
from torch.utils.flop_counter import FlopCounterMode

from memfit import BudgetTrainer
from memfit.errors import ConfigError
from memfit.strategies import Fidelity, Freezing, FrozenFeatures, HalfPrecision, Truncation
from memfit.strategies.frozen_features import cached_features
from sentences import SENTENCES

pytestmark = [
    pytest.mark.filterwarnings("ignore:only the classification head is trainable"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


def test_the_encoder_runs_once_over_each_dataset_however_many_epochs(tmp_path):
    model, rows, others = build(), rows_of(64), rows_of(16, seed=5)
    calls = count_calls(model)
    setup = setup_of(model, tmp_path, num_train_epochs=8, eval_strategy="epoch")
    strategies = [Freezing("encoder"), FrozenFeatures(max_tokens=10_000)]
    # Two short tries of what the head reads, then one batch for each dataset.
    trainer = trained(setup, strategies, rows, eval_dataset=others)
    assert trainer.state.global_step == 8 * 8
    assert calls[0] == 4
    trainer.predict(others)
    assert calls[0] == 4
    trainer.predict(rows_of(3, seed=6))
    assert calls[0] == 5
    assert FrozenFeatures().fidelity is Fidelity.CAPACITY


def test_training_is_that_of_the_frozen_encoder_in_evaluation_mode(tmp_path):
    class EncoderInEvaluation(BudgetTrainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.train()
            model.train = lambda _mode=True: model  # the step would put the encoder back
            model.bert.eval()
            try:
                return super().training_step(model, *args, **kwargs)
            finally:
                del model.train

    rows, others = rows_of(48), rows_of(20, seed=7)
    no_head_dropout = {"classifier_dropout": 0.0}

    def metrics(prediction: Any) -> dict[str, float]:
        return {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        }

    plain = frozen(**no_head_dropout)
    args = arguments(tmp_path, num_train_epochs=3, learning_rate=5e-3)
    stock = EncoderInEvaluation(
        plain, args, train_dataset=rows, eval_dataset=others, data_collator=collate,
        compute_metrics=metrics,
    )  # fmt: skip
    stock.remove_callback(transformers.PrinterCallback)
    stock.train()
    setup = setup_of(frozen(**no_head_dropout), tmp_path, num_train_epochs=3, learning_rate=5e-3)
    ours = trained(setup, [FrozenFeatures()], rows, eval_dataset=others, compute_metrics=metrics)
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-5)
    expected, found = stock.evaluate(), ours.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    ours_logits, stock_logits = ours.predict(others).predictions, stock.predict(others).predictions
    np.testing.assert_allclose(ours_logits, stock_logits, atol=1e-5)


def test_the_saved_model_is_whole_and_loads_in_a_pipeline(tmp_path, tiny_model_dir):
    auto: Any = transformers.AutoModelForSequenceClassification
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    rows = [
        {"input_ids": tokenizer(text)["input_ids"], "labels": index % 2}
        for index, text in enumerate(SENTENCES)
    ]
    setup = setup_of(auto.from_pretrained(tiny_model_dir), tmp_path, max_steps=6)
    trainer = trained(
        setup, [Freezing("encoder"), FrozenFeatures()], rows, processing_class=tokenizer
    )
    trainer.save_model(str(tmp_path / "saved"))
    found = transformers.pipeline("text-classification", str(tmp_path / "saved"))(list(SENTENCES))
    logits = torch.tensor(trainer.predict(rows).predictions)
    assert [one["score"] for one in found] == pytest.approx(
        logits.softmax(-1).max(-1).values.tolist(), abs=1e-5
    )


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    def run(folder: Any, **fields: Any) -> Any:
        setup = setup_of(
            build(), folder, **{"save_strategy": "steps", "save_steps": 4, "max_steps": 8, **fields}
        )
        for strategy in (Freezing("encoder"), FrozenFeatures()):
            strategy.apply(setup)
        return SetupTrainer(setup, train_dataset=rows_of(32), data_collator=collate)

    whole = run(tmp_path / "whole")
    whole.train()
    again = run(tmp_path / "whole")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(again.model.classifier.weight, whole.model.classifier.weight)


def test_columns_the_model_does_not_take_are_removed_before_the_collator(tmp_path):
    import datasets

    def strict(rows: Any) -> dict[str, torch.Tensor]:
        assert set(rows[0]) == {"input_ids", "labels"}
        return collate(rows)

    dataset = datasets.Dataset.from_list([{**row, "text": "abc"} for row in rows_of(10)])
    setup = setup_of(build(), tmp_path, max_steps=2)
    for strategy in (Freezing("encoder"), FrozenFeatures()):
        strategy.apply(setup)
    trainer = SetupTrainer(setup, train_dataset=dataset, data_collator=strict)
    trainer.train()
    assert trainer.predict(dataset).predictions.shape == (10, 2)


def test_grouping_by_length_has_nothing_to_group(tmp_path):
    setup = setup_of(build(), tmp_path, max_steps=2, train_sampling_strategy="group_by_length")
    trainer = trained(setup, [Freezing("encoder"), FrozenFeatures()], rows_of(16))
    assert trainer.state.global_step == 2
    setup.restore()
    assert setup.args.train_sampling_strategy == "group_by_length"
    assert setup.args.remove_unused_columns is True


@pytest.mark.filterwarnings("ignore:this CPU has no bfloat16")
def test_features_are_computed_in_the_precision_of_the_run(tmp_path):
    rows = rows_of(16)
    setup = setup_of(build(), tmp_path, max_steps=2)
    trained(setup, [Freezing("encoder"), HalfPrecision(), FrozenFeatures()], rows)
    half, _ = setup.data_for(rows, collate)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = setup.model.eval().bert(
            **{n: v for n, v in collate(rows).items() if n != "labels"}
        )
    assert half.features.dtype == expected.pooler_output.dtype == torch.bfloat16
    torch.testing.assert_close(half.features, expected.pooler_output, atol=2e-2, rtol=0)


def test_texts_are_cut_before_their_features_are_computed(tmp_path):
    rows, widths = rows_of(16), []
    model = build()
    setup = setup_of(model, tmp_path, max_steps=2)
    setup.train_dataset = rows
    for strategy in (Freezing("encoder"), Truncation(8), FrozenFeatures()):
        strategy.apply(setup)
    model.bert.register_forward_pre_hook(lambda _m, args: widths.append(args[0].shape[1]))
    features, _ = setup.data_for(rows, collate)
    assert max(widths) == 8
    short = [{**row, "input_ids": [*row["input_ids"][:7], SEP][: len(row["input_ids"])]}
             for row in rows]  # fmt: skip
    expected = cached_features(model, short, collate)
    torch.testing.assert_close(features.features, expected.features, atol=1e-5, rtol=1e-5)


def test_a_stream_goes_through_the_whole_model_with_a_word(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows_of(64))

    model = build()
    setup = setup_of(model, tmp_path, max_steps=2)
    for strategy in (Freezing("encoder"), FrozenFeatures()):
        strategy.apply(setup)
    calls = count_calls(model)
    trainer = SetupTrainer(setup, train_dataset=Stream(), data_collator=collate)
    with pytest.warns(UserWarning, match="goes through the frozen encoder in every epoch"):
        trainer.train()
    assert calls[0] == 2


def test_an_encoder_that_learns_again_is_not_cheated_with_old_features(tmp_path):
    model, rows = build(), rows_of(8)
    setup = setup_of(model, tmp_path)
    for strategy in (Freezing("encoder"), FrozenFeatures()):
        strategy.apply(setup)
    setup.data_for(rows, collate)
    model.bert.pooler.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"pooler\.dense\.weight is trainable again"):
        dataset, _ = setup.data_for(rows, collate)
    assert dataset is rows


def test_features_of_only_the_last_datasets_are_kept():
    model = frozen()
    setup = setup_of(model)
    FrozenFeatures().apply(setup)
    calls = count_calls(model)
    sets = [rows_of(3, seed=seed) for seed in range(9)]
    for rows in sets:
        setup.data_for(rows, collate)
    assert calls[0] == 9
    setup.data_for(sets[-1], collate)
    assert calls[0] == 9
    setup.data_for(sets[0], collate)
    assert calls[0] == 10


def test_undo_gives_model_and_arguments_back():
    model, rows = build(), rows_of(8)
    before, kind = state_of(model), type(model.bert)
    logits = model.eval()(**collate(rows)).logits
    setup = setup_of(model)
    for strategy in (Freezing("encoder"), FrozenFeatures()):
        strategy.apply(setup)
    setup.restore()
    assert type(model.bert) is kind
    assert same_state(before, state_of(model))
    assert setup.data_for(rows, collate) == (rows, collate)
    assert torch.equal(model.eval()(**collate(rows)).logits, logits)
    assert not model._forward_pre_hooks


def test_four_epochs_cost_the_arithmetic_of_one(tmp_path):
    def flops(*strategies: Any) -> int:
        # Texts of one length, so that sorting by length makes no difference.
        rows = [row for row in rows_of(400) if len(row["input_ids"]) == 20]
        setup = setup_of(build(), tmp_path, num_train_epochs=4)
        with FlopCounterMode(display=False) as counter:
            trained(setup, [Freezing("encoder"), *strategies], rows)
        return int(counter.get_total_flops())

    assert flops(FrozenFeatures()) == pytest.approx(flops() / 4, rel=0.1)


# ---- where it cannot be had ----


class ReadsEverything(transformers.BertForSequenceClassification):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        output = self.bert(input_ids, attention_mask=attention_mask, **kwargs)
        logits = self.classifier(output.pooler_output + output.last_hidden_state.amax(1))
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=logits)


def test_heads_that_read_more_than_one_vector_are_found_out():
    model = ReadsEverything(frozen().config)
    model.bert.requires_grad_(False)
    reason = FrozenFeatures().unavailable(setup_of(model))
    assert reason == "the head of ReadsEverything reads more of the encoder than one vector a text"


def test_a_decoder_whose_head_reads_the_last_token_is_refused():
    config = transformers.Qwen2Config(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=48, pad_token_id=0, num_labels=2,
    )  # fmt: skip
    model = transformers.Qwen2ForSequenceClassification(config)
    model.model.requires_grad_(False)
    assert "Qwen2ForSequenceClassification" in FrozenFeatures().unavailable(setup_of(model))


def test_the_reasons_are_said():
    strategy = FrozenFeatures()
    learns = strategy.unavailable(setup_of(build()))
    assert learns == (
        "embeddings.word_embeddings.weight of the encoder is still trainable; "
        "freeze the whole encoder first"
    )
    noisy = setup_of(frozen(), neftune_noise_alpha=5.0)
    assert "neftune_noise_alpha asks for new noise" in strategy.unavailable(noisy)
    asks = setup_of(frozen(), include_for_metrics=["inputs"])
    assert "ask for the texts' tokens" in strategy.unavailable(asks)
    assert "no transformers model" in strategy.unavailable(setup_of(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="still trainable"):
        strategy.apply(setup_of(build()))
    with pytest.raises(ConfigError, match="at least 1 token"):
        FrozenFeatures(0)


def test_adapters_are_refused():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build(), LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    assert "adapters change the encoder's features" in FrozenFeatures().unavailable(
        setup_of(adapted)
    )


def test_without_weights_the_family_decides():
    with torch.device("meta"):
        known = transformers.BertForSequenceClassification(copy.deepcopy(frozen().config))
        other = transformers.RoFormerForSequenceClassification(
            transformers.RoFormerConfig(
                vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=48,
            )
        )  # fmt: skip
    known.bert.requires_grad_(False)
    other.roformer.requires_grad_(False)
    assert FrozenFeatures().unavailable(setup_of(known)) == ""
    assert "not known without its weights" in FrozenFeatures().unavailable(setup_of(other))
