"""Fully sharded training: refusals, saving, loading and the way back, in a group of one rank.

Trainings on several ranks are in tests/faults/test_several_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memfit.engine.exchange import Peers
from strategy_fixtures import build, setup_of
from torch import Tensor, nn
from transformers import TrainingArguments

from memfit import BudgetTrainer
from memfit.errors import ConfigError, RankLostError, RunStoppedError
from memfit.memory.cards import find_card
from memfit.memory.tracing import traced_device
from memfit.strategies import FullySharded, Setup
from memfit.strategies.fully_sharded import ShardedModel, in_step, is_divided
from memfit.training.guard.updates import allocate_state
from memfit.training.limits import LiveBytes
from small_training import collate, model_of, texts

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[Peers]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Peers()
    finally:
        dist.destroy_process_group()


def setup_on_ranks(folder: Path, model: nn.Module | None = None) -> Setup:
    setup = setup_of(build() if model is None else model, folder)
    setup.ranks = Peers(0, 2)
    setup.train_dataset = texts(4)
    return setup


def test_one_process_is_refused(tmp_path: Path) -> None:
    setup = setup_on_ranks(tmp_path)
    setup.ranks = Peers()
    with pytest.raises(ConfigError, match="over several processes, and there is one"):
        FullySharded().apply(setup)


def test_gloo_and_fp16_on_a_card_are_refused(tmp_path: Path) -> None:
    setup = setup_on_ranks(tmp_path)
    setup.card, setup.args.ddp_backend = find_card("T4"), "gloo"
    assert "gloo cannot gather weights on a GPU" in FullySharded().unavailable(setup)
    setup.args.ddp_backend = None
    assert FullySharded().unavailable(setup) == ""
    setup.args.fp16 = True
    assert "fp16 scales the loss" in FullySharded().unavailable(setup)


def test_weights_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not all float32"):
        FullySharded().apply(setup_on_ranks(tmp_path, build().bfloat16()))


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear is no transformers model"):
        FullySharded().apply(setup_on_ranks(tmp_path, nn.Linear(2, 2)))


def test_another_strategys_optimizer_is_refused(tmp_path: Path) -> None:
    setup = setup_on_ranks(tmp_path)
    setup.make_optimizer = lambda groups, _: torch.optim.SGD(groups)
    with pytest.raises(ConfigError, match="brings its own optimizer"):
        FullySharded().apply(setup)


def answers(model: nn.Module) -> Tensor:
    batch = collate(texts(5))
    found: Tensor = model.eval()(**batch).logits.detach()
    return found


def test_a_model_that_is_joined_is_as_it_was(group: Peers) -> None:
    model = model_of()
    kinds, parameters = [type(part) for part in model.modules()], list(model.parameters())
    names, hooks = [set(vars(part)) for part in model.modules()], hooks_of(model)
    before, weights = answers(model), [p.detach().clone() for p in parameters]
    for _ in range(2):  # torch refuses to shard the same module twice
        sharded = ShardedModel(model, group, CPU)
        assert all(is_divided(p) for p in model.parameters())
        assert not any(p.untyped_storage().nbytes() for p in parameters)
        assert torch.equal(answers(model), before)
        sharded.join()
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(parameters, weights, strict=True))
        assert [type(part) for part in model.modules()] == kinds
        assert [set(vars(part)) for part in model.modules()] == names
        assert hooks_of(model) == hooks
        assert torch.equal(answers(model), before)


def hooks_of(model: nn.Module) -> list[int]:
    found = (
        value for part in model.modules() for name, value in vars(part).items() if "hooks" in name
    )
    return [len(value) for value in found]


def test_a_weight_of_two_modules_stays_one(group: Peers) -> None:
    model: Any = model_of()
    model.decoder = nn.Linear(16, 40, bias=False)
    model.decoder.weight = words = model.get_input_embeddings().weight
    before = answers(model)
    sharded = ShardedModel(model, group, CPU)
    assert torch.equal(answers(model), before)
    sharded.join()
    assert model.decoder.weight is model.get_input_embeddings().weight is words
    assert torch.equal(answers(model), before)


def test_whole_weights_are_saved_and_loaded(group: Peers) -> None:
    model = model_of()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = ShardedModel(model, group, CPU)
    saved = sharded.model_state()
    assert saved is not None
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], value) for name, value in whole.items())
    doubled = {name: value * 2 for name, value in whole.items()}
    model.load_state_dict(doubled)
    assert all(is_divided(p) for p in model.parameters())
    sharded.join()
    assert all(torch.equal(p, doubled[name]) for name, p in model.named_parameters())


def test_an_optimizer_saves_and_loads_whole_state(group: Peers) -> None:
    model = model_of()
    sharded = ShardedModel(model, group, CPU)
    optimizer = torch.optim.AdamW(model.parameters())
    sharded.divide(optimizer)
    assert allocate_state(optimizer, sharded.keeps)
    moments: Any = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(is_divided(one) for one in moments)
    for number, one in enumerate(moments):
        one.fill_(number)
    with sharded.whole():
        saved = optimizer.state_dict()
        saved["state"] = {index: dict(state) for index, state in saved["state"].items()}
    with sharded.whole(sizes_only=True):
        shapes = [state["exp_avg"].shape for state in optimizer.state.values()]
    assert shapes == [p.shape for p in model.parameters()]
    assert all(
        a is state["exp_avg"] for a, state in zip(moments, optimizer.state.values(), strict=True)
    )
    plain = torch.optim.AdamW(model_of().parameters())
    plain.load_state_dict(saved)
    for number, (p, state) in enumerate(plain.state.items()):
        assert torch.equal(state["exp_avg"], torch.full_like(p, number))
    other = torch.optim.AdamW(model.parameters())
    sharded.divide(other)
    other.load_state_dict(plain.state_dict())
    for number, (_, state) in enumerate(other.state.items()):
        assert is_divided(state["exp_avg"])
        assert bool((state["exp_avg"].to_local() == number).all())
        assert float(state["step"]) == 0


def test_out_of_memory_ends_the_run_in_words(group: Peers, tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, save_strategy="no",
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    model = model_of()
    trainer = BudgetTrainer(model, args, train_dataset=texts(), data_collator=collate)
    sharded = trainer.setup.sharded = ShardedModel(model, group, CPU)
    trainer.executor = in_step(trainer.executor)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.classifier.register_forward_pre_hook(fail)
    with pytest.raises(
        RunStoppedError, match=r"in step 1: .*none can run its rows again by itself"
    ):
        trainer.train()
    assert trainer.setup.sharded is sharded  # other ranks would be needed to undo it


def test_a_lost_rank_is_told_from_other_errors() -> None:
    ranks = Peers(1, 2)

    def fail(said: str) -> None:
        raise RuntimeError(said)

    with pytest.raises(RankLostError, match="process 2 of 2"):
        ranks.meeting(lambda: fail("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ranks.meeting(lambda: fail("mat1 and mat2 shapes cannot be multiplied"))


def test_weights_count_while_they_are_gathered(group: Peers) -> None:
    sharded = ShardedModel(model_of(), group, CPU)
    parameter = next(p for p in sharded._model.parameters() if p.dim() == 2)
    counter = LiveBytes()
    with traced_device.following(counter.resized), counter:
        moment = torch.zeros_like(parameter)  # of one that is divided, this rank's part counts
        assert is_divided(moment)
        part_bytes = counter.live_bytes
        assert part_bytes == parameter.nbytes
        flat = torch.empty(1000)
        assert counter.live_bytes == part_bytes + 4000
        for nbytes in (0, 4000):
            flat.untyped_storage().resize_(nbytes)
            traced_device.resized(flat)
            assert counter.live_bytes == part_bytes + nbytes
    sharded.join()
