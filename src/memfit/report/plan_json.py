"""Plans as JSON for `memfit plan --json`, and the time a planned run takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memfit.records.results import RunSeconds

if TYPE_CHECKING:
    from memfit.planner.advice import Alternatives, NothingFitsError
    from memfit.planner.plan import Checked
    from memfit.planner.price import Price
    from memfit.planner.search import Planning
    from memfit.planner.task import Task

_FORWARD_SHARE = 1 / 3
"""A forward pass against a training step, whose backward takes twice as long."""


def run_seconds(task: Task, price: Price) -> RunSeconds:
    """Every step of every epoch, and every evaluation."""
    args = task.args
    steps = math.ceil(task.steps_per_epoch * args.num_train_epochs)
    if args.max_steps > 0:
        steps = args.max_steps
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    every = args.eval_steps or args.logging_steps or 1
    every = max(round(every * steps) if every < 1 else round(every), 1)
    epochs = max(round(steps / task.steps_per_epoch), 1)
    count = {"no": 0, "epoch": epochs, "steps": steps // every}.get(strategy, 0)
    each = task.eval_rows / task.effective_rows * price.step_seconds * _FORWARD_SHARE
    return RunSeconds(
        training=steps * price.step_seconds,
        evaluation=count * each if task.eval_rows else 0.0,
        evaluations=count if task.eval_rows else 0,
    )


def planning_json(
    model: str, task: Task, planning: Planning, other: Alternatives | None
) -> dict[str, Any]:
    """The plan, the other candidates, and what else could be done."""
    price = planning.chosen.price
    assert price is not None
    seconds = run_seconds(task, price)
    return {
        **_task_json(model, task),
        "chosen": planning.chosen.as_json(),
        "candidates": [candidate.as_json() for candidate in planning.candidates],
        "training_seconds": seconds.training,
        "evaluation_seconds": seconds.evaluation,
        "total_seconds": seconds.total,
        "alternatives": {} if other is None else _alternatives_json(other),
        "left_out": planning.left_out,
        "notes": [note.sentence() for note in planning.notes],
        "considered": planning.considered,
        "traced": planning.traced,
        "planning_seconds": planning.seconds,
    }


def nothing_fits_json(model: str, task: Task, error: NothingFitsError) -> dict[str, Any]:
    """The smallest plan, the bytes it misses the budget by, and what would help."""
    return {
        **_task_json(model, task),
        "chosen": None,
        "candidates": [],
        "smallest": error.smallest.as_json(),
        "missing_bytes": error.missing_bytes,
        "helps": [
            {
                "kind": help_.kind,
                "value": help_.value,
                "device_peak_bytes": help_.device_bytes,
                "sentence": help_.decision.sentence(),
            }
            for help_ in error.helps
        ],
        "notes": [note.sentence() for note in error.notes],
    }


def checked_json(model: str, task: Task, checked: Checked) -> dict[str, Any]:
    """Whether a plan fits, and the bytes it misses the budget by."""
    return {
        **_task_json(model, task),
        "fits": checked.fits,
        "missing_bytes": checked.missing_bytes,
        "changed": list(checked.changed),
        "plan": checked.plan.as_json(),
    }


def _task_json(model: str, task: Task) -> dict[str, Any]:
    return {
        "model": model,
        "card": "cpu" if task.card is None else task.card.name,
        "budget_bytes": task.budget_bytes,
        "rows": len(task.lengths),
        "ranks": task.ranks,
        "effective_batch": task.effective_rows,
        "steps_per_epoch": task.steps_per_epoch,
    }


def _alternatives_json(other: Alternatives) -> dict[str, Any]:
    more = other.more
    return {
        "allow": [
            {
                "name": allowed.name,
                "fits": allowed.fastest is not None,
                **_price_json(allowed.fastest or allowed.smallest),
            }
            for allowed in other.allow
        ],
        "more_budget": None
        if more is None
        else {"budget_bytes": more.budget_bytes, **_price_json(more.price)},
        "smaller_models": [
            {"layers": model.layers, "width": model.width, **_price_json(model.price)}
            for model in other.smaller
        ],
    }


def _price_json(price: Price) -> dict[str, Any]:
    return {
        "fidelity": str(price.fidelity),
        "strategies": [strategy.name for strategy in price.strategies],
        "device_peak_bytes": price.device_bytes,
        "step_seconds": price.step_seconds,
    }
