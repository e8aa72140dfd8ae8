"""What a run needs before weights are loaded: its settings, its table, its budget, its plan."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig
from memfit.config.training_fields import check_training, training_arguments
from memfit.errors import DoesNotFitError, OutputError, TraceError
from memfit.records.evaluation import best_metric
from memfit.records.results import RunFolder, RunSeconds
from memfit.report.terminal import fact_line
from memfit.text import language, t
from memfit.units import Budget, format_bytes, parse_budget

if TYPE_CHECKING:
    import torch

    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.cards import DeviceProfile
    from memfit.planner.advice import Alternatives, NothingFitsError
    from memfit.planner.candidates import Price, Pricer, Workload
    from memfit.planner.plans import Checked, Plan
    from memfit.planner.search import Planning
    from memfit.training.checkpoints import Search

# It changes how the run is done, or what happens where it could not have gone on.
RESUME_MAY_CHANGE = ("budget:", "output_dir:", "on_nan:")


def last_checkpoint(folder: RunFolder, say: Callable[[Any], None]) -> Search:
    """Where a resumed run goes on; damaged checkpoints are named, never quietly started over."""
    from memfit.training.checkpoints import newest_good, nothing_good, tidy

    tidy(folder.checkpoints_dir)
    found = newest_good(folder.checkpoints_dir)
    if found.good is None and found.passed_over:
        why = nothing_good(folder.checkpoints_dir, found)
        raise OutputError(t("{why}; start anew in another --output-dir", why=why))
    for note in found.notes():
        say(fact_line("note", note))
    return found


def resumed_config(
    output_dir: str, config: str | os.PathLike[str] | None, options: dict[str, Any]
) -> RunConfig:
    """The stored configuration; what is given beside it may not say anything else."""
    stored_file = RunFolder(Path(output_dir)).config
    if not stored_file.is_file():
        raise OutputError(
            t(
                "there is no run to resume in {folder}; leave --resume out to start one",
                folder=output_dir,
            )
        )
    stored = RunConfig.from_toml(stored_file)
    given = with_absolute_paths(RunConfig.build(config or stored_file, **options))
    changed = [
        difference
        for difference in given.differences(stored)
        if not difference.startswith(RESUME_MAY_CHANGE)
    ]
    if changed:
        raise OutputError(
            t(
                "--resume continues the run in {folder} as it was begun, but now {changed}; "
                "leave that out, or start anew in another --output-dir",
                folder=output_dir,
                changed="; ".join(changed),
            )
        )
    return given


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Local paths in full, so that run.toml reruns from anywhere."""
    data, model = config.data, config.model
    checked = _absolute(data.validation_file) if data.validation_file else None
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, path=_absolute(data.path), validation_file=checked),
        model=dataclasses.replace(model, model=_absolute(model.model)),
        plan=None if config.plan is None else os.path.abspath(Path(config.plan).expanduser()),
        output_dir=os.path.abspath(Path(config.output_dir).expanduser())
        if config.output_dir
        else None,
    )


def _absolute(path: str) -> str:
    """A hub id stays as it is."""
    local = Path(path).expanduser()
    return os.path.abspath(local) if local.exists() else path


_FORWARD_SHARE = 1 / 3
"""A forward pass against a training step, whose backward takes twice as long."""


@dataclass(frozen=True, kw_only=True)
class PreparedTask:
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
        from memfit.planner.plans import check

        return check(plan, self.workload, self.card, self.budget_bytes)

    def signed(self, plan: Plan) -> Plan:
        """With the run it is for, so that its file alone can be checked."""
        tables = self.config.to_tables()
        return replace(plan, run=tables if self.gpu is None else {**tables, "gpu": self.gpu})


def prepare(config: RunConfig, gpu: str | None = None) -> PreparedTask:
    """Reads and tokenizes the table; of the model only its settings are read."""
    from memfit.data import read_table, tokenize
    from memfit.engine.micro_batches import row_lengths
    from memfit.models.loading import load_settings
    from memfit.planner.workload import workload_of_run

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
    return PreparedTask(
        config=config, workload=workload, card=card, gpu=gpu, budget_bytes=budget_bytes
    )


def _check_positions(workload: Workload, config: RunConfig) -> None:
    """As when the weights are loaded; here there are none."""
    from memfit.models.loading import check_positions
    from memfit.planner.pricing.traced_setup import build_model, full_config

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
    from memfit.planner.this_machine import budget_here, card_here

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


def as_json(task: PreparedTask, planning: Planning, other: Alternatives | None) -> dict[str, Any]:
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


def missing_json(task: PreparedTask, error: NothingFitsError) -> dict[str, Any]:
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


def checked_json(task: PreparedTask, checked: Checked) -> dict[str, Any]:
    """Whether a plan fits, and by how much not."""
    return {
        **_about(task),
        "fits": checked.fits,
        "missing_bytes": checked.missing_bytes,
        "changed": list(checked.changed),
        "plan": checked.plan.as_json(),
    }


def _about(task: PreparedTask) -> dict[str, Any]:
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


Say = Callable[[Any], None]

_PLANS_AGAIN = 3
"""After so many plans that missed their budget the last one is adjusted as it runs."""


@dataclasses.dataclass(kw_only=True)
class Choosing:
    """What a plan is chosen for, and where it will be kept."""

    config: RunConfig
    workload: Workload
    device: torch.device
    folder: RunFolder
    say: Say
    checkpoint: Path | None = None
    """The checkpoint a resumed run goes on from."""
    reserve_bytes: int = 0
    """Left free by the next plan: rehearsals of those before ran out of memory."""
    kept: bool = False
    """Whether the plan is that of an earlier run of the same task."""
    _missed: int = 0
    _pricer: Pricer | None = None

    @property
    def may_plan_again(self) -> bool:
        """Whether there is another plan to make when this one misses its budget.

        A resumed run goes on with the optimizer's state as its plan stored it.
        """
        return self.checkpoint is None and self._missed < _PLANS_AGAIN

    def leave_free(self, short_bytes: int) -> None:
        """The last plan needed about so much more than it was allowed."""
        self.reserve_bytes += short_bytes
        self._missed += 1

    def choose(self, given: Plan | None = None) -> Plan | None:
        """The plan; None where memory cannot be predicted and no budget was promised."""
        try:
            if self.checkpoint is not None and self.folder.plan.is_file():
                return self._resumed()
            if given is not None:
                return self._fitting(given, t("the plan given"))
            if self.config.plan is not None:
                from memfit.planner.plans import Plan

                return self._fitting(Plan.read(Path(self.config.plan)), self.config.plan)
            return self._made()
        except TraceError as error:
            if self._budget != Budget():
                raise  # a promise that cannot be checked is not made
            self.say(fact_line("note", t("memory cannot be predicted: {error}", error=error)))
            return None

    @property
    def _budget(self) -> Budget:
        return parse_budget(self.config.budget)

    def _made(self) -> Plan:
        from memfit.planner.this_machine import chosen_here

        found = chosen_here(
            self.workload,
            self._budget,
            self.device,
            exact=self.config.exact,
            allow=self.config.allowed,
            folder=self.folder.path,
            reserve_bytes=self.reserve_bytes,
            pricer=self._pricer,
        )
        self._pricer, self.kept = found.pricer, found.kept
        for note in found.notes:
            self.say(fact_line("note", note.sentence(language())))
        return found.plan

    def _fitting(self, plan: Plan, name: str) -> Plan:
        checked = self._checked(plan)
        if not checked.fits:
            raise DoesNotFitError(does_not_fit_sentence(checked, name))
        return checked.plan

    def _checked(self, plan: Plan) -> Checked:
        from memfit.planner.this_machine import check_here

        return check_here(plan, self.workload, self._budget, self.device)

    def _resumed(self) -> Plan:
        """The plan it was begun by; where it no longer fits, with smaller micro-batches."""
        from memfit.planner.plans import Plan
        from memfit.planner.this_machine import fit_here

        plan = Plan.read(self.folder.plan)
        recorded = self._recorded()
        if recorded is not None:
            candidate = dataclasses.replace(plan.candidate, micro_batching=recorded)
            plan = dataclasses.replace(plan, candidate=candidate)
        checked = self._checked(plan)
        if checked.fits:
            return checked.plan
        return fit_here(self.workload, plan.strategies, self._budget, self.device)

    def _recorded(self) -> MicroBatching | None:
        """The micro-batches of the checkpoint, unless there is another budget now."""
        from memfit.training.checkpoints import recorded_micro_batching

        if self.checkpoint is None or not self.folder.config.is_file():
            return None
        if RunConfig.from_toml(self.folder.config).budget != self.config.budget:
            return None
        return recorded_micro_batching(self.checkpoint)


def does_not_fit_sentence(checked: Checked, name: str) -> str:
    """By how much a plan misses the budget, and what has changed since it was made."""
    price = checked.plan.price
    assert price is not None
    sentence = t(
        "{name} does not fit: it needs {needs} and the budget is {budget}, so "
        "{missing} are missing; make a new one with memfit plan",
        name=name,
        needs=format_bytes(price.device_bytes),
        budget=format_bytes(checked.plan.digest.budget_bytes),
        missing=format_bytes(checked.missing_bytes),
    )
    return f"{sentence} ({'; '.join(checked.changed)})" if checked.changed else sentence
