"""How BudgetTrainer comes to its plan: given, made for a budget, or none."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers

from memfit.errors import ConfigError, DoesNotFitError, MemfitError
from memfit.messages import t
from memfit.runtime.batching import MicroBatching
from memfit.strategies import Strategy

if TYPE_CHECKING:
    from memfit.planner.plan import Plan
    from memfit.planner.values import Workload
    from memfit.runtime.model_changes import ModelChanges
    from memfit.runtime.trainer import BudgetTrainer


@dataclass(frozen=True)
class Asked:
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


def plan_for(trainer: ModelChanges, asked: Asked, eval_dataset: Any) -> Plan | None:
    """The plan for the trainer's budget; None where nothing is left to plan."""
    budget, model = trainer.budget, trainer.setup.model
    if budget is None or model is None or asked.limits is not None:
        return None
    # Imported here: the planner stands above the runtime.
    workloads = importlib.import_module("memfit.planner.workload")
    here = importlib.import_module("memfit.planner.here")
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
                plan = here.chosen_here(workload, budget, device).plan
            else:  # plans are kept by configuration, and this model is more than that
                plan = here.plan_here(workload, budget, device).chosen
        else:  # ranks that measure their cards would come to different plans
            plan = here.fit_here(workload, asked.given or (), budget, device)
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
