"""How BudgetTrainer comes to its plan, changes its model by it, and gives it back as it was.

A trainer's strategies stay in its model after training: predictions are packed, too, and a second
`train()` goes on. They are undone when another trainer is made for the same model.

given or made by model_init  ->  planned for  ->  strategies applied  ->  trained
                             <-  strategies undone, all trained bits kept  <-
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    default_data_collator,
    enable_full_determinism,
    set_seed,
)

from memfit.engine.executors import StepExecutor
from memfit.engine.loss import shifts_labels
from memfit.engine.micro_batches import MicroBatching
from memfit.engine.step_state import RandomState
from memfit.errors import ConfigError, DoesNotFitError, MemfitError
from memfit.strategies import Setup, Strategy, apply_all
from memfit.text import t
from memfit.training.guard.guarded_training import GuardedTraining
from memfit.training.guard.step_guard import Guard

if TYPE_CHECKING:
    from memfit.planner.candidates import Workload
    from memfit.planner.plans import Plan
    from memfit.training.trainer import BudgetTrainer


@dataclass(frozen=True)
class TrainerChoices:
    """What the user chose by hand: None is the planner's to choose."""

    given: Sequence[Strategy] | None
    limits: MicroBatching | None
    own_optimizer: str = ""
    on_nan: str = "stop"

    def strategies(self, plan: Plan | None) -> Sequence[Strategy]:
        """Those to use."""
        if self.given is not None:
            return self.given
        return plan.strategies if plan is not None else ()

    def micro_batches(self, plan: Plan | None) -> MicroBatching:
        """What is on the device at once."""
        if self.limits is not None:
            return self.limits
        return plan.micro_batching if plan is not None else MicroBatching()


def by_name(positional: Sequence[Any]) -> dict[str, Any]:
    """The Trainer's arguments after the model and its TrainingArguments, by their names."""
    names = list(inspect.signature(transformers.Trainer.__init__).parameters)[3:]
    if len(positional) > len(names):
        raise TypeError(f"Trainer takes {len(names) + 2} arguments, not {len(positional) + 2}")
    return dict(zip(names, positional, strict=False))


def own_optimizer(trainer: BudgetTrainer, named: dict[str, Any]) -> str:
    """The name of an optimizer the user made or makes; empty where the arguments say which."""
    made, _ = named.get("optimizers") or (None, None)
    if made is not None:
        return type(made).__name__
    if named.get("optimizer_cls_and_kwargs") is not None:
        return str(named["optimizer_cls_and_kwargs"][0].__name__)
    makes = type(trainer).create_optimizer.__module__
    return "" if makes.startswith(("memfit.", "transformers.")) else "of your own"


def plan_for(trainer: ModelChanges, asked: TrainerChoices, eval_dataset: Any) -> Plan | None:
    """The plan for the trainer's budget; None where nothing is left to plan."""
    budget, model = trainer.budget, trainer.setup.model
    if budget is None or model is None or asked.limits is not None:
        return None
    # Imported here: a trainer without a budget needs no planner.
    from memfit.planner import this_machine
    from memfit.planner import workload as workloads

    device = trainer.setup.args.device
    plan: Plan
    try:
        workload: Workload = workloads.workload_of_model(
            model,
            trainer.user_args,
            trainer.setup.train_dataset,
            user_set=trainer.setup.user_set,
            own_optimizer=asked.own_optimizer,
            stock_loss=trainer.setup.stock_loss,
            eval_rows=len(eval_dataset) if hasattr(eval_dataset, "__len__") else 0,
            skips_bad_steps=asked.on_nan == "skip",
            collate=trainer.collate_rows,
        )
        if asked.given is None and trainer.setup.args.world_size == 1:
            if workload.given is None:
                plan = this_machine.chosen_here(workload, budget, device).plan
            else:  # plans are kept by configuration, and this model is more than that
                plan = this_machine.plan_here(workload, budget, device).chosen
        else:  # ranks that measure their cards would come to different plans
            plan = this_machine.fit_here(workload, asked.given or (), budget, device)
    except (DoesNotFitError, ConfigError):
        raise
    except Exception as error:  # a model may be anything, and fail in any way without weights
        why = str(error).strip().splitlines() or [""]
        reason = why[0] if isinstance(error, MemfitError) else f"{type(error).__name__}: {why[0]}"
        name = type(model).__name__
        warnings.warn(
            t(
                "the memory of {model} cannot be predicted ({reason}): it is trained without a "
                "plan, and the rehearsal and smaller micro-batches keep it inside the budget",
                model=name,
                reason=reason,
            ),
            UserWarning,
            stacklevel=4,
        )
        return None
    return plan


_ATTRIBUTE = "_memfit_held"


class Held:
    """What a model remembers: how to undo the changes, and who made them, if it still lives.

    A copy of the model remembers nothing: its changes are not the trainer's.
    """

    def __init__(
        self, undo: list[Callable[[], None]] | None = None, trainer: ModelChanges | None = None
    ) -> None:
        self.undo = [] if undo is None else undo
        self.trainer = None if trainer is None else weakref.ref(trainer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return Held()

    def __reduce__(self) -> Any:
        return Held, ()


def hold(model: nn.Module, undo: list[Callable[[], None]], trainer: ModelChanges) -> None:
    """Note that this trainer changed the model."""
    vars(model)[_ATTRIBUTE] = Held(undo, trainer)


def let_go(model: nn.Module) -> None:
    """Forget who changed the model: it is as it was."""
    vars(model).pop(_ATTRIBUTE, None)


def give_back(model: nn.Module) -> None:
    """Have the trainer that changed this model undo that; nothing where there is none."""
    held: Held | None = vars(model).get(_ATTRIBUTE)
    if held is None:
        return
    trainer = None if held.trainer is None else held.trainer()
    if trainer is not None:
        trainer.give_back()
    while held.undo:
        held.undo.pop()()
    let_go(model)


_LABEL_COLUMNS = ("label", "label_ids", "labels")


class ModelChanges(GuardedTraining):
    """What BudgetTrainer does to its model, and how it is undone (model_changes.py)."""

    user_args: transformers.TrainingArguments
    model_init: Any
    hp_search_backend: Any
    _asked: TrainerChoices
    _named: Mapping[str, Any]
    """The Trainer's own arguments, as they were given."""
    _class_weights: Sequence[float] | torch.Tensor | None
    _setup_fields: Mapping[str, Any]
    _planned_for: Any = None
    """What the plan was made for; None where it was given."""
    _names: frozenset[str]
    _given_back: bool = False
    _made: nn.Module | None = None
    """By `model_init` for the plan, until the Trainer asks for it."""
    _made_with: RandomState
    _shifts_labels: bool
    _learning_flops: int | None

    if TYPE_CHECKING:  # BudgetTrainer has it

        def create_step_executor(self, micro_batching: MicroBatching) -> StepExecutor: ...

    def _fields_of(self, named: Mapping[str, Any], user_set: frozenset[str] | None) -> Any:
        """What a set-up must know, whatever the model."""
        sees_inputs = type(self).compute_loss is not transformers.Trainer.compute_loss
        own = self._class_weights is not None or named.get("compute_loss_func") is not None
        smooths = self.user_args.label_smoothing_factor != 0
        return {
            "device": self.user_args.device,
            "train_dataset": named.get("train_dataset"),
            "stock_loss": not sees_inputs and not own and not smooths,
            "sees_inputs": sees_inputs,
            "user_set": user_set,
        }

    def _make_model(self, trial: Any = None) -> None:
        """Before the Trainer asks for it: a plan is made for a model, and may change arguments."""
        args = self.setup.args
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        self.setup.model = self._made = super().call_model_init(trial)
        self._made_with = RandomState.now(args.device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As the Trainer's; the model was made already, and the random numbers go on from there."""
        if self._made is None:
            self._make_model(trial)
        self._made = None
        self._made_with.restore(self.args.device)
        return self.setup.model

    def _remake_model(self, trial: Any) -> None:
        """A new model for another training, changed as the one before it, which goes first."""
        self._drop_model()
        self.setup = Setup(model=None, args=self.args, **self._setup_fields)  # type: ignore[arg-type]
        self._make_model(trial)
        self._hp_search_setup(trial)  # a plan is made for the batches of this trial
        self._change_model()
        self._refit(self.setup.model)

    def _drop_model(self) -> None:
        """Hold no model and nothing that belongs to one: two would not fit."""
        if hasattr(self, "executor"):
            self.executor.drop()
            del self.guard, self.executor  # which know it, too
        self.setup.restore()
        handler = self.callback_handler
        handler.model = handler.optimizer = handler.lr_scheduler = None
        self.optimizer = self.lr_scheduler = None
        self.model = self.model_wrapped = self.setup.model = None  # type: ignore[assignment]
        self.accelerator.free_memory()

    def collate_rows(self, rows: list[Any]) -> Any:
        """A batch of these rows, as the Trainer's loader makes it."""
        own = self._named.get("data_collator")
        if own is None:
            tokenizer: Any = self._named.get("processing_class")
            padding = isinstance(tokenizer, PreTrainedTokenizerBase)
            own = DataCollatorWithPadding(tokenizer) if padding else default_data_collator
        if self.user_args.remove_unused_columns:
            known = {*inspect.signature(self.setup.model.forward).parameters, *_LABEL_COLUMNS}
            known |= set(self.user_args.label_names or ())
            rows = [
                {name: row[name] for name in row if name in known}
                if isinstance(row, Mapping)
                else row
                for row in rows
            ]
        return own(rows)

    def _change_model(self) -> None:
        """Plan where there is something to plan, and apply the strategies."""
        model: Any = self.setup.model
        if model is None:
            return
        if self.plan is None or self._planned_for not in (None, _shape_of(model, self.setup.args)):
            self.plan = plan_for(self, self._asked, self._named.get("eval_dataset"))
            if "IPython" in sys.modules:
                import memfit.report.notebook  # noqa: F401 - draws plans in notebooks
            self._planned_for = _shape_of(model, self.setup.args)
        used = self._asked.strategies(self.plan)
        self._names = frozenset(strategy.name for strategy in used)
        hold(model, self.setup.undo, self)
        apply_all(used, self.setup)

    def _equip(self) -> None:
        """What runs the steps of the model as it is now."""
        limits = self._asked.micro_batches(self.plan)
        self.executor = self.create_step_executor(limits)

    def _refit(self, model: nn.Module) -> None:
        """The same for a model that came after the first."""
        self.model = model  # type: ignore[assignment]
        self._shifts_labels = shifts_labels(model)
        self._cap, self._learning_flops = None, None
        self._equip()
        self.guard = Guard(self, self._names)
        self.guard.adjuster.keeps_plan = self._keeps_plan

    @property
    def _keeps_plan(self) -> bool:
        by_hand = self.plan is not None and self._planned_for is None
        return self._asked.limits is not None or by_hand

    def give_back(self) -> None:
        """Undo what strategies did to the model, with all the bits that were trained.

        Called when another trainer is made for it. This one still predicts, and `train()` begins
        with its strategies anew.
        """
        if self._given_back:
            return
        self.executor.drop()
        weights = self._joined(self.accelerator.unwrap_model(self.model)) or {}
        self.setup.restore()
        model = self.setup.model
        _without_autocast(model)
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.data = weights[name].to(parameter.device)
        self._given_back = True
        let_go(model)
        self.setup = Setup(model=model, args=self.args, **self._setup_fields)
        self.model_wrapped = model
        self.optimizer = self.lr_scheduler = None
        self._names = frozenset()
        self._refit(model)

    def _take_again(self) -> None:
        """Have the strategies back in a model that was given back."""
        give_back(self.model)
        self._given_back = False
        self._change_model()
        self._refit(self.setup.model)
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)
        self.model_wrapped = self.model


def _shape_of(model: nn.Module, args: transformers.TrainingArguments) -> Any:
    """What a plan is made for: all weights by their sizes, and the effective batch."""
    shapes = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    return type(model), args.per_device_train_batch_size, shapes


def _without_autocast(model: nn.Module) -> None:
    """Take accelerate's wrapper off, which computes in the precision of the last training.

    Its own `unwrap_model` takes the decorators of transformers off with it.
    """
    original = vars(model).pop("_original_forward", None)
    if original is not None:
        vars(model).pop("forward", None)
        if getattr(original, "__func__", None) is not type(model).forward:
            model.forward = original
