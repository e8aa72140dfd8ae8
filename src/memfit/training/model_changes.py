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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    default_data_collator,
    enable_full_determinism,
    set_seed,
)

from memfit.engine.micro_batches import MicroBatching
from memfit.engine.step_state import RandomState, preserved_rng
from memfit.errors import ConfigError, DoesNotFitError, MemfitError
from memfit.i18n import t
from memfit.strategies import Setup, Strategy, apply_all

if TYPE_CHECKING:
    from memfit.planner.plan import Plan
    from memfit.training.trainer import BudgetTrainer


@dataclass(frozen=True)
class TrainerChoices:
    """What the user chose by hand: None is the planner's to choose."""

    given: Sequence[Strategy] | None
    limits: MicroBatching | None
    own_optimizer: str = ""
    own_loss: bool = False
    """Whether the loss is computed by a function of the user."""
    weighted_loss: bool = False
    """Whether the loss is weighted by class."""
    on_nan: str = "stop"

    def strategies(self, plan: Plan | None) -> Sequence[Strategy]:
        """The strategies to use."""
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


def own_optimizer(trainer: BudgetTrainer, named: Mapping[str, Any]) -> str:
    """The name of an optimizer that the user made; empty if the arguments name it."""
    made, _ = named.get("optimizers") or (None, None)
    if made is not None:
        return type(made).__name__
    if named.get("optimizer_cls_and_kwargs") is not None:
        return str(named["optimizer_cls_and_kwargs"][0].__name__)
    makes = type(trainer).create_optimizer.__module__
    return "" if makes.startswith(("memfit.", "transformers.")) else "of your own"


def plan_of_trainer(
    trainer: BudgetTrainer, asked: TrainerChoices, eval_dataset: Any
) -> Plan | None:
    """The plan for the trainer's budget; None where nothing is left to plan."""
    budget, model = trainer.budget, trainer.setup.model
    if budget is None or model is None or asked.limits is not None:
        return None
    # Imported here: a trainer without a budget needs no planner.
    from memfit.planner.search import plan_for
    from memfit.planner.task import task_of_model

    try:
        trained = task_of_model(
            model,
            trainer.user_args,
            trainer.setup.train_dataset,
            user_set=trainer.setup.user_set,
            own_optimizer=asked.own_optimizer,
            stock_loss=trainer.setup.stock_loss,
            weighted_loss=asked.weighted_loss,
            eval_rows=len(eval_dataset) if hasattr(eval_dataset, "__len__") else 0,
            skips_bad_steps=asked.on_nan == "skip",
            collate=trainer.changes.collate_rows,
        )
        task = trained.placed(budget, trainer.setup.args.device)
        # One plan runs on all ranks, so it is made for the one with the least memory.
        least = min(trainer.ranks.gathered(task.budget_bytes))
        task = replace(task, budget_bytes=least)
        with preserved_rng():
            if asked.given is None:
                # Ranks that measure their cards would come to different plans.
                return trainer.ranks.share(lambda: plan_for(task).chosen)
            return plan_for(task, strategies=asked.given).chosen
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


_ATTRIBUTE = "_memfit_held"


class Held:
    """What a model remembers: how to undo the changes, and who made them, if it still lives.

    A copy of the model remembers nothing: its changes are not the trainer's.
    """

    def __init__(
        self, undo: list[Callable[[], None]] | None = None, changes: ModelChanges | None = None
    ) -> None:
        self.undo = [] if undo is None else undo
        self.changes = None if changes is None else weakref.ref(changes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return Held()

    def __reduce__(self) -> Any:
        return Held, ()


def let_go(model: nn.Module) -> None:
    """Forgets who changed the model, which is unchanged again."""
    vars(model).pop(_ATTRIBUTE, None)


def give_back(model: nn.Module) -> None:
    """Makes the trainer that changed this model undo its changes, if there is one."""
    held: Held | None = vars(model).get(_ATTRIBUTE)
    if held is None:
        return
    changes = None if held.changes is None else held.changes()
    if changes is not None:
        changes.give_back()
    while held.undo:
        held.undo.pop()()
    let_go(model)


_LABEL_COLUMNS = ("label", "label_ids", "labels")


class ModelChanges:
    """Plans for the model of a trainer, changes it by the strategies, and undoes the changes."""

    def __init__(
        self,
        trainer: BudgetTrainer,
        model: nn.Module | None,
        args: transformers.TrainingArguments,
        asked: TrainerChoices,
        plan: Plan | None,
        named: Mapping[str, Any],
        user_set: frozenset[str] | None,
    ) -> None:
        self._trainer = trainer
        self.asked = asked
        self._fields = self._fields_of(named, user_set)
        self.setup = self._new_setup(model, args)
        self.plan = plan
        self.used: tuple[Strategy, ...] = ()
        """What the strategies in use do to a step."""
        self.given_back = False
        """Whether the model is without its strategies until the next `train()`."""
        self._named = named
        self._planned_for: Any = None
        """What the plan was made for; None where it was given."""
        self._made: nn.Module | None = None
        """The model that `model_init` made for the plan, until the Trainer asks for it."""
        self._made_with: RandomState

    def _fields_of(self, named: Mapping[str, Any], user_set: frozenset[str] | None) -> Any:
        """What a set-up must know, whatever the model."""
        trainer = self._trainer
        sees_inputs = type(trainer).compute_loss is not transformers.Trainer.compute_loss
        smooths = trainer.user_args.label_smoothing_factor != 0
        return {
            "device": trainer.user_args.device,
            "ranks": trainer.ranks.count,
            "train_dataset": named.get("train_dataset"),
            "stock_loss": not (
                sees_inputs or self.asked.own_loss or self.asked.weighted_loss or smooths
            ),
            "sees_inputs": sees_inputs,
            "user_set": user_set,
        }

    def _new_setup(self, model: nn.Module | None, args: transformers.TrainingArguments) -> Setup:
        return Setup(model=model, args=args, **self._fields)  # type: ignore[arg-type]

    def apply(self) -> None:
        """Plan where there is something to plan, and apply the strategies."""
        model: Any = self.setup.model
        if model is None:
            return
        if self.plan is None or self._planned_for not in (None, _shape_of(model, self.setup.args)):
            self.plan = plan_of_trainer(self._trainer, self.asked, self._named.get("eval_dataset"))
            if "IPython" in sys.modules:
                import memfit.report.notebook  # noqa: F401 - draws plans in notebooks
            self._planned_for = _shape_of(model, self.setup.args)
        used = self.asked.strategies(self.plan)
        self.used = tuple(used)
        vars(model)[_ATTRIBUTE] = Held(self.setup.undo, self)
        apply_all(used, self.setup)

    def cancel(self) -> None:
        """Undo the changes of a trainer that cannot be made: the user keeps the model given."""
        self.setup.restore()
        if self.setup.model is not None:
            let_go(self.setup.model)

    # ---- models made by model_init ----

    def make_model(self, trial: Any = None) -> None:
        """Makes the model before the Trainer asks for it, because the plan needs it."""
        args = self.setup.args
        enable_full_determinism(args.seed) if args.full_determinism else set_seed(args.seed)
        # BudgetTrainer's own call_model_init hands out the model that is made here.
        self._made = transformers.Trainer.call_model_init(self._trainer, trial)
        self.setup.model = self._made
        self._made_with = RandomState.now(args.device)

    def hand_out_model(self, trial: Any = None) -> nn.Module:
        """Returns the model made before, or a new one, and restores the random state after it."""
        if self._made is None:
            self.make_model(trial)
        self._made = None
        self._made_with.restore(self.setup.args.device)
        return self.setup.model

    def remake_model(self, trial: Any) -> None:
        """Drops the model and what belongs to it, then makes a new one with the same changes.

        Two models would not fit.
        """
        trainer = self._trainer
        if hasattr(trainer, "executor"):
            trainer.executor.drop()
            del trainer.guard, trainer.executor  # which know it, too
        self.setup.restore()
        handler = trainer.callback_handler
        handler.model = handler.optimizer = handler.lr_scheduler = None
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.model = trainer.model_wrapped = self.setup.model = None  # type: ignore[assignment]
        trainer.accelerator.free_memory()
        self.setup = self._new_setup(None, trainer.args)
        self.make_model(trial)
        trainer._hp_search_setup(trial)  # a plan is made for the batches of this trial
        self.apply()
        trainer.equip(self.setup.model)

    # ---- giving the model back ----

    def give_back(self) -> None:
        """Undo what strategies did to the model, with all the bits that were trained.

        Called when another trainer is made for it. This one still predicts, and `train()` begins
        with its strategies anew.
        """
        if self.given_back:
            return
        trainer = self._trainer
        trainer.executor.drop()
        weights = trainer.masters.joined() or {}
        self.setup.restore()
        model = self.setup.model
        # accelerate's wrapper computes in the precision of the last training. Its own
        # `unwrap_model` takes the decorators of transformers off with it.
        if (original := vars(model).pop("_original_forward", None)) is not None:
            vars(model).pop("forward", None)
            if getattr(original, "__func__", None) is not type(model).forward:
                model.forward = original
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.data = weights[name].to(parameter.device)
        self.given_back = True
        let_go(model)
        self.setup = self._new_setup(model, trainer.args)
        trainer.model_wrapped = model
        trainer.optimizer = trainer.lr_scheduler = None
        self.used = ()
        trainer.equip(model)

    def take_again(self) -> None:
        """Applies the strategies again to a model that was given back."""
        trainer = self._trainer
        give_back(trainer.model)
        self.given_back = False
        self.apply()
        trainer.equip(self.setup.model)
        if trainer.place_model_on_device:
            trainer._move_model_to_device(trainer.model, trainer.args.device)
        trainer.model_wrapped = trainer.model

    # ---- what the plan is made for ----

    def collate_rows(self, rows: list[Any]) -> Any:
        """A batch of these rows, as the Trainer's loader makes it."""
        user_args = self._trainer.user_args
        own = self._named.get("data_collator")
        if own is None:
            tokenizer: Any = self._named.get("processing_class")
            padding = isinstance(tokenizer, PreTrainedTokenizerBase)
            own = DataCollatorWithPadding(tokenizer) if padding else default_data_collator
        if user_args.remove_unused_columns:
            known = {*inspect.signature(self.setup.model.forward).parameters, *_LABEL_COLUMNS}
            known |= set(user_args.label_names or ())
            rows = [
                {name: row[name] for name in row if name in known}
                if isinstance(row, Mapping)
                else row
                for row in rows
            ]
        return own(rows)


def _shape_of(model: nn.Module, args: transformers.TrainingArguments) -> Any:
    """What a plan depends on: the sizes of all weights, and the effective batch."""
    shapes = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    return type(model), args.per_device_train_batch_size, shapes
