"""Any head the stock Trainer trains: the same weights after its steps, in whatever micro-batches.

The reference is the stock Trainer with the whole effective batch; SGD shows gradients as they are.
"""

# ruff: noqa: ARG002 - the Trainer decides what is handed over.
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    GPT2Config,
    GPT2LMHeadModel,
    XLNetConfig,
    XLNetLMHeadModel,
)

from memfit import BudgetTrainer, TrainingArguments
from memfit.engine.micro_batches import MicroBatching
from memfit.strategies import Packing
from traced_plans import used

WIDTH, ROWS, LABELS = 24, 16, 3
SETTINGS: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": WIDTH, "num_labels": LABELS,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Pooling(BertPreTrainedModel):
    """Heads people write, all of which see padding."""

    def __init__(self, config: BertConfig, pool: str = "mean") -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.pool = pool
        self.lstm = nn.LSTM(16, 8, bidirectional=True, batch_first=True)
        width = 16 * WIDTH if pool == "flatten" else 16
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        if self.pool == "lstm":
            hidden = self.lstm(hidden)[0]
        pooled = {
            "mean": lambda: hidden.mean(1),
            "max": lambda: hidden.amax(1),
            "lstm": lambda: hidden[:, -1],
            "flatten": lambda: hidden.flatten(1),
        }[self.pool]()
        logits = self.classifier(pooled)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Bag(nn.Module):
    """No transformers model at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.classifier = nn.Linear(16, LABELS)

    def forward(self, input_ids=None, labels=None):
        logits = self.classifier(self.embed(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def tokens(row: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * row + seed)
    length = int(torch.randint(3, 15, (), generator=generator))
    return torch.randint(5, 60, (length,), generator=generator).tolist()


def padded(ids: list[int]) -> dict[str, Tensor]:
    whole = torch.tensor(ids + [0] * (WIDTH - len(ids)))
    return {"input_ids": whole, "attention_mask": whole.ne(0).long()}


def a_class(row: int) -> dict[str, Tensor]:
    return {**padded(tokens(row)), "labels": torch.tensor(row % LABELS)}


def every_token(row: int) -> dict[str, Tensor]:
    batch = padded(tokens(row))
    labels = torch.where(batch["attention_mask"].eq(1), batch["input_ids"] % LABELS, -100)
    return {**batch, "labels": labels}


def some_tokens(row: int) -> dict[str, Tensor]:
    batch = padded(tokens(row))
    hidden = (batch["input_ids"] + row) % 3 == 0
    return {**batch, "labels": torch.where(hidden & batch["input_ids"].ne(0), 7, -100)}


def next_tokens(row: int) -> dict[str, Tensor]:
    batch = padded(tokens(row))
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"].eq(0), -100)}


def an_answer(row: int) -> dict[str, Tensor]:
    last = len(tokens(row)) - 1
    return {
        **padded(tokens(row)),
        "start_positions": torch.tensor(last // 2),
        "end_positions": torch.tensor(last),
    }


def a_choice(row: int) -> dict[str, Tensor]:
    texts = [padded(tokens(row, seed)) for seed in range(2)]
    stacked = {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
    return {**stacked, "labels": torch.tensor(row % 2)}


def gpt(_: BertConfig) -> GPT2LMHeadModel:
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": WIDTH, "vocab_size": 60}
    small |= {"bos_token_id": 1, "eos_token_id": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**small, **off))


def an_answer_beyond_the_text(row: int) -> dict[str, Tensor]:
    """The text of some rows ends before the answer does: their end is ignored, their start not."""
    end = {"end_positions": torch.tensor(WIDTH)} if row % 3 else {}
    return {**an_answer(row), **end}


def masked_and_next(row: int) -> dict[str, Tensor]:
    return {**some_tokens(row), "next_sentence_label": torch.tensor(row % 2)}


def few_next_tokens(row: int) -> dict[str, Tensor]:
    """Of some rows only the first token has a label, which a head that shifts would not count."""
    labels = next_tokens(row)["labels"]
    labels[1 + 2 * (row % 3) :] = -100
    return {**next_tokens(row), "labels": labels}


def one_target(row: int) -> dict[str, Tensor]:
    ids = padded(tokens(row))["input_ids"]
    last = len(tokens(row)) - 1
    hidden, wanted = torch.zeros(WIDTH, WIDTH), torch.zeros(1, WIDTH)
    hidden[:, last] = wanted[0, last] = 1.0
    target = {"perm_mask": hidden, "target_mapping": wanted, "labels": ids[last].view(1)}
    return {**padded(tokens(row)), **target}


def bart(_: BertConfig) -> BartForCausalLM:
    return BartForCausalLM(
        BartConfig(
            vocab_size=60, d_model=16, decoder_layers=2, decoder_attention_heads=2,
            decoder_ffn_dim=32, max_position_embeddings=WIDTH, dropout=0.0,
        )
    )  # fmt: skip


def xlnet(_: BertConfig) -> XLNetLMHeadModel:
    return XLNetLMHeadModel(
        XLNetConfig(vocab_size=60, d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0)
    )


Row = Callable[[int], dict[str, Tensor]]
HEADS: dict[str, tuple[Callable[[BertConfig], nn.Module], Row]] = {
    "mean": (lambda c: Pooling(c, "mean"), a_class),
    "max": (lambda c: Pooling(c, "max"), a_class),
    "lstm": (lambda c: Pooling(c, "lstm"), a_class),
    "flatten": (lambda c: Pooling(c, "flatten"), a_class),
    "plain module": (lambda _: Bag(), lambda row: _without_mask(a_class(row))),
    "classes": (BertForSequenceClassification, a_class),
    "token classes": (BertForTokenClassification, every_token),
    "masked": (BertForMaskedLM, some_tokens),
    "causal": (gpt, next_tokens),
    "answers": (
        lambda _: BertForQuestionAnswering(BertConfig(**{**SETTINGS, "num_labels": 2})),
        an_answer,
    ),
    "choices": (BertForMultipleChoice, a_choice),
    "causal, not shifted": (bart, few_next_tokens),
    "one target": (xlnet, one_target),
    "answers beyond the text": (
        lambda _: BertForQuestionAnswering(BertConfig(**{**SETTINGS, "num_labels": 2})),
        an_answer_beyond_the_text,
    ),
    "two losses": (BertForPreTraining, masked_and_next),
}


def _without_mask(row: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in row.items() if name != "attention_mask"}


def run(
    kind: type, model: nn.Module, row: Row, tmp_path: Any, **named: Any
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses and weights of two steps of SGD, and the predictions after them."""
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=2, optim="sgd", learning_rate=0.1,
        lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True, logging_steps=1, seed=1,
    )  # fmt: skip
    rows = [row(number) for number in range(ROWS)]
    # The classification heads ignore the number of items they are told (transformers#47688).
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    trainer = kind(model, args, train_dataset=rows, **named)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return losses, weights, trainer.predict(rows).predictions


def built(head: str) -> tuple[nn.Module, Row]:
    torch.manual_seed(0)
    make, row = HEADS[head]
    return make(BertConfig(**SETTINGS)), row


def assert_same(ours: Any, stock: Any) -> None:
    assert ours[0] == pytest.approx(stock[0], abs=2e-5)
    for name, value in stock[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=2e-6, msg=name)
    _assert_same_predictions(ours[2], stock[2])


def _assert_same_predictions(ours: Any, stock: Any) -> None:
    if isinstance(stock, tuple):
        for mine, theirs in zip(ours, stock, strict=True):
            _assert_same_predictions(mine, theirs)
    else:
        assert ours.shape == stock.shape
        np.testing.assert_allclose(ours, stock, atol=2e-5)


@pytest.mark.parametrize("limits", [None, MicroBatching(max_rows=3)], ids=["whole", "cut"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains_and_predicts_as_with_the_stock_trainer(head, limits, tmp_path):
    stock = run(transformers.Trainer, *built(head), tmp_path)
    assert_same(run(BudgetTrainer, *built(head), tmp_path, micro_batching=limits), stock)


@pytest.mark.parametrize(
    ("head", "whole"), [("two losses", True), ("answers beyond the text", True), ("answers", False)]
)
def test_a_batch_of_several_losses_is_whole_where_no_weight_serves_all(head, whole, tmp_path):
    said: list[str] = []
    limits = MicroBatching(max_rows=3)
    model, row = built(head)
    run(BudgetTrainer, model, row, tmp_path, micro_batching=limits, say_adjustment=said.append)
    assert len(said) == whole
    assert all("over different labels" in line and "whole batches" in line for line in said)


# ---- inside a budget ----

UNPREDICTED = ("plain module",)


@pytest.mark.parametrize("head", [head for head in HEADS if head not in ("max", "lstm")])
def test_every_head_can_be_given_a_budget(head, tmp_path):
    stock = run(transformers.Trainer, *built(head), tmp_path)
    planned: list[BudgetTrainer] = []

    class Noted(BudgetTrainer):
        def train(self, *args, **kwargs):
            planned.append(self)
            return super().train(*args, **kwargs)

    expected = contextlib.nullcontext()
    if head in UNPREDICTED:
        expected = pytest.warns(UserWarning, match="Bag cannot be predicted")
    with expected:
        ours = run(Noted, *built(head), tmp_path, budget="60MB")
    assert_same(ours, stock)
    (trainer,) = planned
    assert (trainer.plan is None) == (head in UNPREDICTED)
    assert trainer.guard.rehearsal is not None
    if trainer.plan is not None:
        packs = used(trainer.plan, "packing") is not None
        assert packs == (head == "classes")


@pytest.mark.filterwarnings("ignore:the memory of Bag cannot be predicted")
@pytest.mark.parametrize("head", ["token classes", "plain module"])
def test_a_budget_that_binds_cuts_a_batch_of_any_head_by_its_rows(head, tmp_path):
    guards: list[Any] = []

    class Noted(BudgetTrainer):
        def train(self, *args, **kwargs):
            output = super().train(*args, **kwargs)
            guards.append(self.guard)
            return output

    stock = run(transformers.Trainer, *built(head), tmp_path)
    run(Noted, *built(head), tmp_path, budget="60MB", strategies=[])
    assert guards[0].used.max_tokens is None
    tight = int(0.8 * guards[0].rehearsal.peak_bytes)
    ours = run(Noted, *built(head), tmp_path, budget=f"{tight}B", strategies=[])
    assert guards[1].used.max_tokens is not None
    assert guards[1].budget_cap.peak_bytes <= tight
    assert_same(ours, stock)


def test_another_head_is_predicted_as_closely_as_a_classifier(tmp_path):
    from memfit.planner.search import plan_for
    from memfit.planner.task import task_of_model
    from memfit.training.limits import LiveBytes
    from memfit.units import Budget

    collate = transformers.default_data_collator
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, report_to="none", use_cpu=True, optim="sgd"
    )
    shares = []
    for head in ("classes", "token classes", "mean"):
        model, row = built(head)
        rows = [row(number) for number in range(8)]
        workload = task_of_model(model, args, rows, collate=collate)
        assert set(workload.lengths) == {WIDTH}
        task = workload.placed(Budget(bytes=10**9), args.device)
        price = plan_for(task, strategies=()).chosen.price
        assert price is not None
        counter = LiveBytes()
        counter.adopt(model.parameters())
        with counter:
            model(**collate(rows))["loss"].backward()
        shares.append(price.peak.allocated_bytes / counter.peak_bytes)
    assert shares[1:] == pytest.approx([shares[0]] * 2, rel=0.01)


# ---- losses of the user's own ----


class OfInputs:
    """A loss that looks at the inputs and calls a part of the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        mask = inputs["attention_mask"].unsqueeze(-1)
        outputs = model(**inputs)
        inner = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        hidden = inner.bert(**inputs).last_hidden_state
        mean = (hidden * mask).sum(1) / mask.sum(1)
        loss = nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        loss = loss / inputs["input_ids"].shape[0] + 0.1 * mean.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("limits", [None, MicroBatching(max_tokens=40)], ids=["whole", "cut"])
@pytest.mark.parametrize("strategies", [(), (Packing(),)], ids=["padded", "packed"])
def test_a_loss_of_the_inputs_sees_them_as_the_collator_made_them(strategies, limits, tmp_path):
    stock = run(type("Stock", (OfInputs, transformers.Trainer), {}), *built("classes"), tmp_path)
    ours = type("Ours", (OfInputs, BudgetTrainer), {})
    named = {"strategies": strategies, "micro_batching": limits}
    assert_same(run(ours, *built("classes"), tmp_path, **named), stock)


def test_a_loss_of_the_inputs_is_packed_inside_the_model(tmp_path):
    from memfit.strategies.packing.packed_attention import count_packed_calls

    ours = type("Ours", (OfInputs, BudgetTrainer), {})
    with count_packed_calls() as calls:
        run(ours, *built("classes"), tmp_path, strategies=[Packing()])
    assert calls[0] >= 2 * SETTINGS["num_hidden_layers"]


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_function_is_told_every_label_of_several_a_row(masked, tmp_path):
    def row(number: int) -> dict[str, Tensor]:
        labels = torch.tensor([float((number + label) % 2) for label in range(LABELS)])
        if masked:
            labels[number % LABELS] = -100.0
        return {**a_class(number), "labels": labels}

    def loss_of(outputs, labels, num_items_in_batch=None):
        counted = labels.ne(-100)
        each = nn.functional.binary_cross_entropy_with_logits(
            outputs.logits, labels.clamp(min=0.0), reduction="none"
        )
        return (each * counted).sum() / num_items_in_batch

    def model() -> nn.Module:
        torch.manual_seed(0)
        problem = {"problem_type": "multi_label_classification"}
        return BertForSequenceClassification(BertConfig(**SETTINGS, **problem))

    named = {"compute_loss_func": loss_of}
    stock = run(transformers.Trainer, model(), row, tmp_path, **named)
    limits = {"micro_batching": MicroBatching(max_rows=3)}
    assert_same(run(BudgetTrainer, model(), row, tmp_path, **named, **limits), stock)


# ---- what comes out ----


@pytest.mark.parametrize("strategies", [(), (Packing(),)], ids=["padded", "packed"])
@pytest.mark.parametrize("shown", ["output_hidden_states", "output_attentions"])
def test_outputs_of_every_token_keep_the_collators_width(shown, strategies, tmp_path):
    rows = [a_class(number) for number in range(ROWS)]
    predictions = []
    for kind in (BudgetTrainer, transformers.Trainer):
        model, _ = built("classes")
        model.set_attn_implementation("eager")  # type: ignore[operator]
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
        named = {"strategies": strategies} if kind is BudgetTrainer else {}
        trainer = kind(model, args, **named)
        trainer.remove_callback(transformers.PrinterCallback)
        setattr(model.config, shown, True)  # asked for after the trainer was made
        predictions.append(trainer.predict(rows).predictions)
    _assert_same_predictions(*predictions)


def test_packing_gives_way_to_outputs_of_every_token(tmp_path):
    from memfit.errors import ConfigError

    model, _ = built("classes")
    model.config.output_hidden_states = True  # type: ignore[union-attr]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    with pytest.raises(ConfigError, match="output_hidden_states=True"):
        BudgetTrainer(model, args, strategies=[Packing()])


# ---- batches without names ----


def test_batches_that_are_tuples_train(tmp_path):
    class Named:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ids, labels = inputs
            outputs = model(input_ids=ids, labels=labels)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def collate(rows):
        return (
            torch.stack([r["input_ids"] for r in rows]),
            torch.stack([r["labels"] for r in rows]),
        )

    found = []
    for base in (transformers.Trainer, BudgetTrainer):
        model, row = built("plain module")
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, max_steps=2, optim="sgd",
            learning_rate=0.5, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        limits = {"micro_batching": MicroBatching(max_rows=3)} if base is BudgetTrainer else {}
        data = [row(number) for number in range(ROWS)]
        trainer = type("Own", (Named, base), {})(
            model, args, train_dataset=data, data_collator=collate, **limits
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        found.append([value.detach().clone() for value in trainer.model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
