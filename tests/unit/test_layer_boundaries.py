"""A backward pass that moves weights, failing anywhere: finished bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from strategy_fixtures import arguments, build, collate, rows_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.bert.modeling_bert import BertLayer

from memfit import BudgetTrainer
from memfit.engine.layer_boundaries import TRIES, HalfDoneError, LayerBoundaries
from memfit.strategies import Checkpointing, GradientRelease, LowBitAdamW, Packing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.slow,
]
CPU = torch.device("cpu")
BATCH = collate(rows_of(8))


class FailAt(TorchDispatchMode):
    """Operators that find no memory, once an update has been made; the updates' own never do."""

    def __init__(self, sink: Any, *numbers: int, anywhere: bool = False) -> None:
        super().__init__()
        self._anywhere = anywhere
        self._sink = sink
        self._numbers = set(numbers)
        self.seen = self.raised = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        counts = self._anywhere or self._sink.touched
        if counts and torch._C._current_autograd_node() is not None:
            self.seen += 1
            if self.seen in self._numbers:
                self.raised += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


class Step:
    """One step of a model of four layers whose gradients are released."""

    run_again = 0

    def __init__(
        self, folder: Path, mode: Any, strategies: list[Any], family: str = "bert", **changes: Any
    ) -> None:
        settings = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 160}
        model = build(family, **{**settings, **changes})
        clip = 1.0 if mode == "two_pass" else 0.0
        trainer: Any = BudgetTrainer(
            model, arguments(folder, max_steps=1, learning_rate=1e-3, max_grad_norm=clip),
            train_dataset=rows_of(8), data_collator=collate,
            strategies=[LowBitAdamW(), GradientRelease(mode), *strategies],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.create_optimizer()
        self.model, self.sink = trainer.model.train(), trainer.setup.sink
        self.boundaries = LayerBoundaries(self.model, self.sink, CPU, lambda _: None)
        self.executor = dataclasses.replace(trainer.executor, boundaries=self.boundaries)

    def run(self, *numbers: int, anywhere: bool = False) -> tuple[list[torch.Tensor], FailAt]:
        with FailAt(self.sink, *numbers, anywhere=anywhere) as fault:
            while True:
                torch.manual_seed(5)
                try:
                    self.loss = self.executor.run(self.model, BATCH)
                    break
                except torch.OutOfMemoryError:
                    # Nothing had moved: the step is run again as a whole.
                    self.sink.abandon()
                    self.run_again += 1
        self.sink.finish()
        state = [t for s in self.sink.optimizer.state.values() for t in s.values()]
        ended = [*self.model.parameters(), *state, torch.get_rng_state(), self.loss]
        return [tensor.detach().clone() for tensor in ended], fault


@pytest.mark.parametrize("mode", ["release", "two_pass"])
@pytest.mark.parametrize(
    "strategies", [[], [Packing(), Checkpointing(2)]], ids=["padded", "packed, recomputed"]
)
def test_a_released_backward_that_fails_anywhere_ends_as_if_it_had_not(tmp_path, mode, strategies):
    clean, counted = Step(tmp_path, mode, strategies).run()
    assert counted.seen > 100
    resumed = 0
    for number in range(2, counted.seen, counted.seen // 5):
        step = Step(tmp_path, mode, strategies)
        ended, fault = step.run(number)
        assert fault.raised == 1
        resumed += step.boundaries.resumed
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ended, clean, strict=True))
    assert resumed > 1


SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("albert", {}),
    "albert in groups": ("albert", {"num_hidden_groups": 2, "inner_group_num": 2}),
    "mpnet": ("mpnet", {}),
    "deberta": ("deberta-v2", {}),
    "deberta, positions as they are": ("deberta-v2", {"norm_rel_ebd": "none"}),
}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", SHARING)
def test_what_several_layers_share_gets_the_gradient_of_all(tmp_path, name, recomputed):
    """ALBERT's layers are one; MPNet and DeBERTa hand every layer the same positions."""
    family, changes = SHARING[name]
    strategies = [Checkpointing(2)] if recomputed else []

    def step() -> Step:
        return Step(tmp_path, "release", strategies, family, **changes)

    clean, counted = step().run(anywhere=True)
    resumed = run_again = 0
    # Once in a step, and twice.
    first = range(2, counted.seen, counted.seen // 5)
    for numbers in [*((number,) for number in first), (counted.seen // 2, counted.seen // 2 + 30)]:
        ended, fault = (again := step()).run(*numbers, anywhere=True)
        assert fault.raised == len(numbers)
        resumed += again.boundaries.resumed
        run_again += again.run_again
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ended, clean, strict=True))
    # ALBERT's weights move at the end of backward: before that a step is run again as a whole.
    assert (run_again if family == "albert" else resumed) > 1


class Tied(transformers.BertForSequenceClassification):
    """Its head reads the embeddings' own table once more, as masked language models do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.again = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.again.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        output = super().forward(input_ids, attention_mask, output_hidden_states=True)
        words = self.again(output.hidden_states[-1]).float()
        loss = torch.nn.functional.cross_entropy(output.logits.float(), labels)
        output.loss = loss + torch.nn.functional.cross_entropy(
            words.flatten(0, 1), input_ids.flatten()
        )
        return output


def test_a_table_that_the_head_shares_gets_both_gradients(tmp_path, monkeypatch):
    plain = build

    def tied(*args: Any, **changes: Any) -> Any:
        model = Tied(plain(*args, **changes).config)
        model.load_state_dict(plain(*args, **changes).state_dict(), strict=False)
        return model

    monkeypatch.setattr(f"{__name__}.build", tied)
    clean, counted = Step(tmp_path, "release", []).run()
    for number in range(2, counted.seen, counted.seen // 6):
        ended, fault = Step(tmp_path, "release", []).run(number)
        assert fault.raised == 1
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ended, clean, strict=True))


def test_buffers_of_layers_that_are_run_again_move_once(tmp_path):
    def step() -> Step:
        made = Step(tmp_path, "release", [])
        for layer in made.model.bert.encoder.layer:
            layer.register_buffer("seen", torch.zeros(()))
            layer.register_forward_hook(lambda module, *_: module.seen.add_(1) and None)
        return made

    _, counted = step().run()
    ended = step()
    ended.run(counted.seen // 2)
    assert ended.boundaries.resumed == 1
    assert [int(layer.seen) for layer in ended.model.bert.encoder.layer] == [1] * 4


def test_it_may_fail_again_while_it_is_finished(tmp_path):
    clean, counted = Step(tmp_path, "release", []).run()
    step = Step(tmp_path, "release", [])
    third = counted.seen // 3
    ended, fault = step.run(third, third + 40, third + 90)
    assert fault.raised == 3
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ended, clean, strict=True))


def test_what_cannot_be_finished_says_where_to_go_on_from(tmp_path):
    step = Step(tmp_path, "release", [])
    passed = step.boundaries._passed

    def fails(index: int, *rest: Any) -> None:
        if index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        passed(index, *rest)

    step.boundaries._passed = fails  # type: ignore[method-assign]
    with pytest.raises(HalfDoneError, match="half those of the next step and were not saved"):
        step.run()
    assert step.boundaries.resumed > TRIES


def test_a_step_that_has_moved_nothing_is_left_to_be_run_again(tmp_path):
    step = Step(tmp_path, "release", [])
    weights = [p.detach().clone() for p in step.model.parameters()]
    counters = step.sink.optimizer.clock.counters.clone()
    broken = dataclasses.replace(step.executor, loss=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.run(step.model, BATCH)
    step.sink.abandon()
    assert torch.equal(step.sink.optimizer.clock.counters, counters)
    assert all(
        torch.equal(p, before) for p, before in zip(step.model.parameters(), weights, strict=True)
    )


def test_weights_that_have_moved_cannot_be_abandoned(tmp_path):
    step = Step(tmp_path, "release", [])
    torch.manual_seed(5)
    step.executor.run(step.model, BATCH)
    with pytest.raises(RuntimeError, match="it can only be finished"):
        step.sink.abandon()


def test_removing_gives_the_model_back(tmp_path):
    step = Step(tmp_path, "release", [])
    step.boundaries.remove()
    assert not step.sink.by_layers
    assert type(step.model.bert.encoder.layer[0]) is BertLayer
