"""The whole step as CUDA graphs, inside the Trainer, on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from memfit import BudgetTrainer
from memfit.engine.micro_batches import MicroBatching
from memfit.strategies import (
    Checkpointing,
    CudaGraphs,
    FusedLayers,
    GradientRelease,
    LowBitAdamW,
    Packing,
)
from memfit.strategies.activation_checkpointing import _recomputed
from memfit.training.guard.rehearsal import _Stage
from small_training import collate, wide_model, wide_texts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SINKS = {
    "kept": [LowBitAdamW()],
    "kept8": [LowBitAdamW(), GradientRelease("kept8")],
    "fp16": [LowBitAdamW(dtype="float16")],
}


class Graphs(transformers.TrainerCallback):
    """The token counts of the graphs there are after a step; they go with the training."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.tokens: dict[str, set[int]] = {}
        self.held = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        executor = self.trainer.executor
        self.held = max(self.held, getattr(executor, "captured_graphs", 0))
        for name, cache in getattr(executor, "_caches", {}).items():
            self.tokens.setdefault(name, set()).update(cache.tokens)


def train(folder, strategies, clip, *, dropout=0.0, rows=None, **more):
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=20, learning_rate=5e-4,
        lr_scheduler_type="linear", max_grad_norm=clip, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = BudgetTrainer(
        wide_model(dropout), args, train_dataset=rows or wide_texts(), data_collator=collate,
        strategies=strategies, **more,
    )  # fmt: skip
    graphs = Graphs()
    graphs.trainer = trainer
    trainer.add_callback(graphs)
    trainer.train()
    return graphs, [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("name", SINKS)
def test_replayed_steps_train_as_launched_ones(tmp_path, name):
    clip = 0.5
    _, launched = train(tmp_path, [Packing(), *SINKS[name]], clip)
    graphs, replayed = train(tmp_path, [Packing(), *SINKS[name], CudaGraphs(64)], clip)
    assert graphs.tokens["whole"]
    assert replayed == pytest.approx(launched, abs=1e-2)
    assert replayed[-1] < replayed[0] - 0.1


def test_micro_batches_are_replayed_too(tmp_path):
    strategies = [Packing(), LowBitAdamW(), GradientRelease("kept8")]
    micro = MicroBatching(max_tokens=150)
    _, launched = train(tmp_path, strategies, 0.5, micro_batching=micro)
    graphs, replayed = train(tmp_path, [*strategies, CudaGraphs(64)], 0.5, micro_batching=micro)
    assert graphs.tokens["micro"]
    assert replayed == pytest.approx(launched, abs=1e-2)


def test_every_replay_draws_fresh_dropout(tmp_path):
    row = wide_texts(1)[0]
    strategies = [Packing(), LowBitAdamW(), GradientRelease("kept8"), CudaGraphs(64)]
    args = {"dropout": 0.3, "rows": [row] * 320}
    graphs, losses = train(tmp_path, strategies, 0.0, **args)
    assert len(set(losses[2:])) == len(losses[2:])
    assert graphs.held == 1


def test_an_evaluation_that_found_no_memory_has_its_graphs_back_when_a_step_is_timed(
    tmp_path, monkeypatch
):
    """Making room drops them, and the step that is timed must not capture them again."""
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=16, max_steps=4, eval_strategy="steps",
        eval_steps=4, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = BudgetTrainer(
        wide_model(0.0), args, train_dataset=wide_texts(), eval_dataset=wide_texts(64),
        data_collator=collate, budget="20GB",
        strategies=[Packing(), LowBitAdamW(), CudaGraphs(64)], micro_batching=MicroBatching(),
    )  # fmt: skip
    failed: list[bool] = []

    def fails_once(module, *_):
        if not module.training and not failed:
            failed.append(True)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB")

    trainer.model.register_forward_pre_hook(fails_once)
    graphs: list[tuple[int, int]] = []
    one_try = _Stage._try

    def counted(stage, *given, **how):
        before = trainer.executor.captured_graphs
        done = one_try(stage, *given, **how)
        graphs.append((before, trainer.executor.captured_graphs))
        return done

    monkeypatch.setattr(_Stage, "_try", counted)
    trainer.train()
    assert failed
    before, after = graphs[-1]  # the step whose seconds are said
    assert before == after > 0


def tabular():
    """A stock classifier with numbers beside the text; only they say what the label is.

    By hooks: a class of the user's own is not packed, so nothing of it is captured.
    """
    model = wide_model(0.0)
    model.from_table = torch.nn.Linear(2, model.config.num_labels)
    torch.nn.init.zeros_(model.from_table.weight)
    seen = {}

    def before(_module, args, kwargs):
        seen["table"] = kwargs.pop("table", None)
        kwargs.pop("note", None)
        return args, kwargs

    def after(_module, _args, kwargs, output):
        if seen["table"] is not None:
            table = seen["table"].to(model.from_table.weight.dtype)
            output.logits = output.logits + model.from_table(table).float()
        if kwargs.get("labels") is not None:
            output.loss = torch.nn.functional.cross_entropy(output.logits, kwargs["labels"])
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    return model


def tabular_rows():
    rows = []
    for index, row in enumerate(wide_texts()):
        label = index * 7 % 3 % 2
        rows.append({**row, "labels": label, "table": [12.0 * label - 6.0, 6.0 - 12.0 * label]})
    return rows


def collate_tables(rows, masked=True):
    batch = collate([{"input_ids": r["input_ids"], "labels": r["labels"]} for r in rows])
    batch["table"] = torch.tensor([row["table"] for row in rows])
    if not masked:
        del batch["attention_mask"]
    return batch


class Stream(torch.utils.data.IterableDataset):
    """Rows that come one after another."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows * 40)


def train_tables(folder, strategies, rows, collator, **more):
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=30, learning_rate=1e-2,
        max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, seed=3, remove_unused_columns=False,
    )  # fmt: skip
    trainer = BudgetTrainer(
        tabular(), args, train_dataset=rows, data_collator=collator, strategies=strategies, **more
    )
    graphs = Graphs()
    graphs.trainer = trainer
    trainer.add_callback(graphs)
    trainer.train()
    return graphs, [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "without a mask"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "micro-batches"])
def test_replays_read_this_batchs_inputs_beside_the_texts(tmp_path, masked, split):
    strategies = [Packing(), LowBitAdamW(), GradientRelease("kept8")]
    more = {"micro_batching": MicroBatching(max_rows=5)} if split else {}
    args = (tabular_rows(), lambda rows: collate_tables(rows, masked))
    _, launched = train_tables(tmp_path, strategies, *args, **more)
    graphs, replayed = train_tables(tmp_path, [*strategies, CudaGraphs(64)], *args, **more)
    assert graphs.tokens["micro" if split else "whole"]
    assert replayed == pytest.approx(launched, abs=3e-2)
    assert replayed[-1] < 0.3


def test_a_stream_is_trained_by_graphs_too(tmp_path):
    strategies = [Packing(), LowBitAdamW(), CudaGraphs(64)]
    rows = Stream(tabular_rows())
    graphs, losses = train_tables(tmp_path, strategies, rows, collate_tables)
    assert graphs.tokens["whole"]
    assert losses[-1] < 0.3


def test_inputs_whose_shape_changes_are_launched_and_trained_alike(tmp_path):
    def widened(rows):
        batch = collate_tables(rows)
        # A mapping with another text in each batch: nothing a graph could be handed.
        batch["note"] = {"first": frozenset([rows[0]["input_ids"][0]])}
        return batch

    strategies = [Packing(), LowBitAdamW(), CudaGraphs(64)]
    graphs, losses = train_tables(tmp_path, strategies, tabular_rows(), widened)
    assert graphs.held == 0
    assert losses[-1] < 0.3


@pytest.mark.parametrize("sink", [(), (GradientRelease("kept8"),)])
def test_an_fp16_overflow_in_a_graph_is_skipped_and_the_run_goes_on(tmp_path, sink):
    class Loud(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):  # noqa: ARG002
            trainer.setup.sink.loss_scale.value.fill_(2.0**40)

    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=16, max_steps=30, learning_rate=5e-4,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=3,
        max_grad_norm=1.0,
    )  # fmt: skip
    trainer = BudgetTrainer(
        wide_model(), args, train_dataset=wide_texts(), data_collator=collate, callbacks=[Loud()],
        strategies=[Packing(), LowBitAdamW(dtype="float16"), *sink, CudaGraphs(64)],
    )  # fmt: skip
    trainer.train()
    assert int(trainer.setup.sink.loss_scale.skipped_steps) >= 1
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < losses[0] - 0.1


def test_a_recomputed_part_drops_in_a_graph_what_it_dropped_before():
    """Else its gradient is that of another forward pass. x is 1: output and gradient are equal."""
    x = torch.ones(1 << 14, device="cuda", requires_grad=True)

    def once():
        dropped = _recomputed(lambda v: torch.nn.functional.dropout(v, 0.5) * 1.0, (x,), {})
        (gradient,) = torch.autograd.grad(dropped.sum(), x)
        return dropped.detach(), gradient

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output, gradient = once()
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, gradient)
        seen.append(output.clone())
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("more", [[], [FusedLayers()]], ids=["stock", "fused"])
def test_recomputed_layers_in_graphs_learn_as_kept_ones_do(tmp_path, more):
    """With dropout: the losses of 20 steps, summed, differ by chance alone."""
    strategies = [Packing(), *more, LowBitAdamW(), CudaGraphs(64)]
    sums = []
    for extra in ([], [Checkpointing()]):
        graphs, losses = train(tmp_path, [*strategies, *extra], 0.5, dropout=0.3)
        assert graphs.tokens["whole"]
        sums.append(sum(losses[10:]) / 10)
    assert sums[1] == pytest.approx(sums[0], abs=0.1)
