"""From a table, a model and a card to a plan, without loading any weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig
from memfit.evaluation import best_metric
from memfit.settings import check_training, training_arguments
from memfit.units import parse_budget

if TYPE_CHECKING:
    import torch

    from memfit.memory.cards import DeviceProfile
    from memfit.planner.alternatives import Alternatives
    from memfit.planner.missing import NothingFitsError
    from memfit.planner.plan import Checked, Plan
    from memfit.planner.search import Planning
    from memfit.planner.values import Price, Workload

_FORWARD_SHARE = 1 / 3
"""A forward pass against a training step, whose backward takes twice as long."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be planned: a run, and the card it is for."""

    config: RunConfig
    workload: Workload
    card: DeviceProfile | None
    """None is this machine's CPU."""
    gpu: str | None
    """The card as it was named; None is this machine."""
    budget_bytes: int

    def plan(self) -> Planning:
        """The fastest plan inside the budget, or DoesNotFitError."""
        from memfit.planner.search import make_plan

        planning = make_plan(
            self.workload,
            self.budget_bytes,
            self.card,
            exact=self.config.exact,
            allow=self.config.allowed,
        )
        return replace(planning, chosen=self.signed(planning.chosen))

    def check(self, plan: Plan) -> Checked:
        """A plan from a file, priced anew."""
        from memfit.planner.plan import check

        return check(plan, self.workload, self.card, self.budget_bytes)

    def signed(self, plan: Plan) -> Plan:
        """With the run it is for, so that its file alone can be checked."""
        tables = self.config.to_tables()
        return replace(plan, run=tables if self.gpu is None else {**tables, "gpu": self.gpu})


def prepare(config: RunConfig, gpu: str | None = None) -> Task:
    """Reads and tokenizes the table; of the model only its settings are read."""
    from memfit.data import read_table, tokenize
    from memfit.models import load_settings
    from memfit.planner.workload import workload_of_run
    from memfit.runtime.lengths import row_lengths

    check_training(config.training)
    named = _named_card(gpu)
    text = read_table(config.data)
    # A folder with only a config.json and a tokenizer can be planned for.
    settings, tokenizer = load_settings(replace(config.model, from_scratch=True), text.labels)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(
            config.training,
            Path(folder),
            best_metric(text.labels.task)[0],
            head_only=config.model.freeze == "encoder",
            task=text.labels.task,
        )
    tokens = tokenize(text, tokenizer, config.data.max_length)
    workload = workload_of_run(
        config,
        settings,
        args,
        text.labels,
        row_lengths(tokens.train),
        eval_rows=len(tokens.validation),
    )
    _check_positions(workload, config)
    card, budget_bytes = _card_and_budget(config, gpu, named, args.device)
    return Task(config=config, workload=workload, card=card, gpu=gpu, budget_bytes=budget_bytes)


def _check_positions(workload: Workload, config: RunConfig) -> None:
    """As when the weights are loaded; here there are none."""
    from memfit.models import check_positions
    from memfit.planner.trace_setup import build_model, full_config

    model = build_model(replace(workload, lora=None, freeze=None), full_config(workload))
    check_positions(model, config.data.max_length, config.model.model)


def _named_card(gpu: str | None) -> DeviceProfile | None:
    if gpu is None or gpu.strip().lower() == "cpu":
        return None
    from memfit.memory.cards import find_card

    return find_card(gpu)


def _card_and_budget(
    config: RunConfig, gpu: str | None, named: DeviceProfile | None, device: torch.device
) -> tuple[DeviceProfile | None, int]:
    """The card named, or this machine's; `auto` leaves room for its display."""
    from memfit.planner.here import budget_here, card_here

    budget = parse_budget(config.budget)
    if named is not None:
        total_bytes = named.total_bytes
        return named, budget.resolve(total_bytes=total_bytes, free_bytes=total_bytes)
    import torch

    here = torch.device("cpu") if gpu is not None else device
    return card_here(here), budget_here(budget, here)


def stored_options(run: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The run a plan's file is for, as options, and the card it was made for."""
    options: dict[str, Any] = {}
    for key, value in run.items():
        if key in ("data", "model", "training") and isinstance(value, Mapping):
            options |= value
        elif key not in ("gpu", "output_dir", "plan"):
            options[key] = value
    gpu = run.get("gpu")
    return options, None if gpu is None else str(gpu)


@dataclass(frozen=True, kw_only=True)
class RunSeconds:
    """How long a run takes, as predicted."""

    training: float
    evaluation: float
    evaluations: int

    @property
    def total(self) -> float:
        """Both together."""
        return self.training + self.evaluation


def run_seconds(workload: Workload, price: Price) -> RunSeconds:
    """Every step of every epoch, and every evaluation."""
    args = workload.args
    steps = math.ceil(workload.steps_per_epoch * args.num_train_epochs)
    if args.max_steps > 0:
        steps = args.max_steps
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    every = args.eval_steps or args.logging_steps or 1
    every = max(round(every * steps) if every < 1 else round(every), 1)
    epochs = max(round(steps / workload.steps_per_epoch), 1)
    count = {"no": 0, "epoch": epochs, "steps": steps // every}.get(strategy, 0)
    each = workload.eval_rows / workload.effective_rows * price.step_seconds * _FORWARD_SHARE
    return RunSeconds(
        training=steps * price.step_seconds,
        evaluation=count * each if workload.eval_rows else 0.0,
        evaluations=count if workload.eval_rows else 0,
    )


# ---- as JSON ----


def as_json(task: Task, planning: Planning, other: Alternatives | None) -> dict[str, Any]:
    """The plan, the others, and what else could be done."""
    price = planning.chosen.price
    assert price is not None
    seconds = run_seconds(task.workload, price)
    return {
        **_about(task),
        "chosen": planning.chosen.as_json(),
        "candidates": [one.as_json() for one in planning.candidates],
        "training_seconds": seconds.training,
        "evaluation_seconds": seconds.evaluation,
        "total_seconds": seconds.total,
        "alternatives": {} if other is None else _alternatives_json(other),
        "left_out": planning.left_out,
        "notes": [one.sentence() for one in planning.notes],
        "considered": planning.considered,
        "traced": planning.traced,
        "planning_seconds": planning.seconds,
    }


def missing_json(task: Task, error: NothingFitsError) -> dict[str, Any]:
    """Nothing fits: the smallest plan, what is missing, what would help."""
    return {
        **_about(task),
        "chosen": None,
        "candidates": [],
        "smallest": error.smallest.as_json(),
        "missing_bytes": error.missing_bytes,
        "helps": [
            {
                "kind": one.kind,
                "value": one.value,
                "device_peak_bytes": one.device_bytes,
                "sentence": one.decision.sentence(),
            }
            for one in error.helps
        ],
    }


def checked_json(task: Task, checked: Checked) -> dict[str, Any]:
    """Whether a plan fits, and by how much not."""
    return {
        **_about(task),
        "fits": checked.fits,
        "missing_bytes": checked.missing_bytes,
        "changed": list(checked.changed),
        "plan": checked.plan.as_json(),
    }


def _about(task: Task) -> dict[str, Any]:
    return {
        "model": task.config.model.model,
        "card": "cpu" if task.card is None else task.card.name,
        "budget_bytes": task.budget_bytes,
        "rows": len(task.workload.lengths),
        "effective_batch": task.workload.effective_rows,
        "steps_per_epoch": task.workload.steps_per_epoch,
    }


def _alternatives_json(other: Alternatives) -> dict[str, Any]:
    more = other.more
    return {
        "allow": [
            {
                "name": one.name,
                "fits": one.fastest is not None,
                **_price(one.fastest or one.smallest),
            }
            for one in other.allow
        ],
        "more_budget": None
        if more is None
        else {"budget_bytes": more.budget_bytes, **_price(more.price)},
        "smaller_models": [
            {"layers": one.layers, "width": one.width, **_price(one.price)} for one in other.smaller
        ],
    }


def _price(price: Price) -> dict[str, Any]:
    return {
        "fidelity": str(price.candidate.fidelity),
        "strategies": [one.name for one in price.candidate.strategies],
        "device_peak_bytes": price.device_bytes,
        "step_seconds": price.step_seconds,
    }
