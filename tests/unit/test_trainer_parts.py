"""BudgetTrainer is the one class of overrides; what it hands over to works without a Trainer."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerState

import memfit
from memfit import BudgetTrainer
from memfit.errors import LossError, SaveError
from memfit.training.checkpoints import checkpoints_in, damage
from memfit.training.export import MasterWeights
from memfit.training.health import Health
from memfit.training.saving import CheckpointSaver

SOURCE = Path(memfit.__file__).parent
METHODS = {name for name, value in vars(transformers.Trainer).items() if callable(value)}


def test_budget_trainer_stands_directly_on_the_trainer() -> None:
    assert BudgetTrainer.__mro__ == (BudgetTrainer, *transformers.Trainer.__mro__)


def overrides_in(source: str) -> Iterator[str]:
    """Classes made of a Trainer, and methods that are put onto one from outside."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if {"Trainer", "BudgetTrainer"} & set(bases):
                yield node.name
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Attribute) or target.attr not in METHODS:
                    continue
                if ast.unparse(target.value).lower().endswith("trainer"):
                    yield ast.unparse(target)


def test_no_trainer_method_is_overridden_outside_of_it() -> None:
    found = [
        (path.relative_to(SOURCE).as_posix(), name)
        for path in sorted(SOURCE.rglob("*.py"))
        for name in overrides_in(path.read_text(encoding="utf-8"))
    ]
    assert found == [("training/trainer.py", "BudgetTrainer")]


def test_overrides_are_found_wherever_they_are_hidden() -> None:
    assert list(overrides_in("class Mixed(Half, transformers.Trainer): ...")) == ["Mixed"]
    assert list(overrides_in("self._trainer.log = print")) == ["self._trainer.log"]
    assert not list(
        overrides_in("class Parts(TrainerParts, Protocol): ...\nself.log = trainer.log")
    )


# ---- each alone ----


def parts(folder: Path, **more: Any) -> Any:
    """As much of a trainer as the collaborators ask for."""
    args = SimpleNamespace(
        output_dir=str(folder), should_save=True, save_total_limit=1, device=torch.device("cpu")
    )
    alone = SimpleNamespace(
        wait_for_everyone=lambda: None, num_processes=1, unwrap_model=lambda model: model
    )
    return SimpleNamespace(
        args=args, state=TrainerState(global_step=3, max_steps=9), accelerator=alone,
        optimizer=None, setup=SimpleNamespace(sink=None, make_optimizer=None),
        callback_handler=SimpleNamespace(train_dataloader=None), **more,
    )  # fmt: skip


def test_a_checkpoint_lies_beside_its_place_until_it_is_whole(tmp_path: Path) -> None:
    trainer = parts(tmp_path)
    checkpoints = CheckpointSaver(trainer, make_room=lambda: None)

    def write() -> None:
        unfinished = Path(checkpoints.folder_for(str(tmp_path))) / "checkpoint-3"
        unfinished.mkdir(parents=True)
        trainer.state.save_to_json(str(unfinished / "trainer_state.json"))
        assert not checkpoints_in(tmp_path)

    assert checkpoints.last_good is None
    saved = checkpoints.save(tmp_path, write, check=lambda: None)
    assert checkpoints_in(tmp_path) == [saved] == [checkpoints.last_good] == [checkpoints.held()]
    assert not damage(saved)
    trainer.state.global_step = 4
    assert checkpoints.held() is None  # a step has been made since


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    trainer = parts(tmp_path)
    checkpoints = CheckpointSaver(trainer, make_room=lambda: None)

    def write() -> None:
        folder = Path(checkpoints.folder_for(str(tmp_path)))
        unfinished = folder / f"checkpoint-{trainer.state.global_step}"
        unfinished.mkdir(parents=True)
        trainer.state.save_to_json(str(unfinished / "trainer_state.json"))
        if trainer.state.global_step > 3:
            raise OSError("no room")

    first = checkpoints.save(tmp_path, write, check=lambda: None)
    trainer.state.global_step = 6
    with pytest.raises(SaveError, match="no room") as stopped:
        checkpoints.save(tmp_path, write, check=lambda: None)
    assert stopped.value.last_good == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_health_stops_or_skips_a_step_whose_loss_is_not_finite(tmp_path: Path) -> None:
    bad, usual = torch.tensor(math.nan), torch.tensor(2.0)
    stops = Health(parts(tmp_path), "stop")
    assert stops.keep(bad, lambda: usual) is bad
    with pytest.raises(LossError, match="the loss is nan in step 4"):
        stops.leaves_out(None)
    trainer = parts(tmp_path)
    skips = Health(trainer, "skip")
    assert skips.keep(bad, lambda: usual) == usual
    with pytest.warns(UserWarning, match="step 4 is skipped"):
        assert skips.leaves_out(torch.tensor(1.0))
    assert [entry["step"] for entry in trainer.state.log_history] == [4]
    assert not skips.leaves_out(torch.tensor(1.0))  # each loss is looked at once


def test_masters_are_those_of_half_precision_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    masters = MasterWeights(parts(tmp_path, model=model), load_optimizer=lambda _: None)
    assert masters.joined() is None
    whole = {"weight": torch.full((2, 2), 1 + 2**-20)}
    trainer = parts(tmp_path, model=model.bfloat16())
    trainer.optimizer = SimpleNamespace(fp32_state_dict=lambda *_, **__: whole)
    masters = MasterWeights(trainer, load_optimizer=lambda _: None)
    masters.widen()
    assert torch.equal(model.weight, whole["weight"])
