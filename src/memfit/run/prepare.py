"""What a run needs before weights are loaded: its settings, its table, its budget, its plan."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig
from memfit.config.launched import LaunchedRank, cards_are_shared
from memfit.config.training_fields import check_training, training_arguments
from memfit.errors import ConfigError, DoesNotFitError, OutputError, TraceError
from memfit.i18n import language, t
from memfit.memory.device import kind_of
from memfit.records.evaluation import best_metric
from memfit.records.results import RunFolder, RunSeconds
from memfit.records.scoring import Scoring, class_weights_of_run, scoring_of_run
from memfit.report.terminal import fact_line
from memfit.run.rank_agent import count_of
from memfit.units import Budget, format_bytes, parse_budget
from memfit.waiting import doing

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainingArguments

    from memfit.data import LabelSpace, TextData, TokenizedData
    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.cards import CardPlace, DeviceProfile
    from memfit.planner.advice import Alternatives, NothingFitsError
    from memfit.planner.candidates import PlanTask, Price, Pricer
    from memfit.planner.plans import Checked, Plan
    from memfit.planner.search import Planning
    from memfit.planner.workload import Workload
    from memfit.training.checkpoints import Search

# It changes how the run is done, or what happens where it could not have gone on.
RESUME_MAY_CHANGE = ("budget:", "gpus:", "output_dir:", "on_nan:", "plan.")


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


def is_begun(output_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run that can be resumed."""
    return RunFolder(Path(output_dir)).config.is_file()


def is_finished(output_dir: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run that came to its end; its summary is written last."""
    return RunFolder(Path(output_dir)).summary.is_file()


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
    return replace(
        config,
        data=replace(data, path=_absolute(data.path), validation_file=checked),
        model=replace(model, model=_absolute(model.model)),
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
class Prepared:
    """A run before its weights are loaded: its rows, its arguments, and what is planned for."""

    config: RunConfig
    text: TextData
    tokens: TokenizedData
    settings: PretrainedConfig
    """The model's own, with a head for these labels."""
    tokenizer: PreTrainedTokenizerBase
    arguments: TrainingArguments
    scoring: Scoring
    class_weights: list[float] | None = None
    """What a row of each class counts in the loss, by label id; None where all count alike."""
    gpu: str | None = None
    """A card by name, or cpu; None is what this machine trains on."""
    place: CardPlace | None = None
    """The machine that card is in; like this one if None."""
    most_bytes: int | None = None
    """What every rank may hold; None of a run on one."""
    ranks: int | None = None
    """How many to plan for; as many as there are now if None."""

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every training row."""
        from memfit.engine.micro_batches import row_lengths

        return row_lengths(self.tokens.train)

    @cached_property
    def workload(self) -> Workload:
        """What is trained, whatever the plan."""
        from memfit.planner.workload import workload_of_run

        return workload_of_run(
            self.config,
            self.settings,
            self.arguments,
            self.text.labels,
            self.lengths,
            eval_rows=len(self.tokens.validation),
            ranks=self.ranks,
        )

    @cached_property
    def task(self) -> PlanTask:
        """What a plan is made for, inside the budget as it is in bytes now."""
        from memfit.planner.this_machine import task_for

        task = task_for(
            self.workload,
            parse_budget(self.config.budget),
            _named_card(self.gpu, self.place) or self.arguments.device,
            exact=self.config.exact,
            allow=self.config.allowed,
        )
        if self.most_bytes is None:
            return task
        return replace(task, budget_bytes=min(task.budget_bytes, self.most_bytes))

    def plan(self) -> Planning:
        """The fastest plan inside the budget, or DoesNotFitError with what would fit instead."""
        from memfit.planner.search import make_plan

        planning = make_plan(self.task)
        return replace(planning, chosen=self.signed(planning.chosen))

    def signed(self, plan: Plan) -> Plan:
        """Adds the run's settings to the plan, so that its file alone can be checked."""
        tables = dict(self.config.to_tables())
        if self.gpu is not None:
            tables["gpu"] = self.gpu
        if self.place is not None:
            given = asdict(self.place).items()
            tables["place"] = {key: value for key, value in given if value is not None}
        return replace(plan, run=tables)


def prepare(
    config: RunConfig,
    output_dir: Path,
    text: TextData | None = None,
    *,
    tokens: TokenizedData | None = None,
    gpu: str | None = None,
    place: CardPlace | None = None,
    has_weights: bool = True,
) -> Prepared:
    """Reads and tokenizes the table; of the model only its settings are read.

    `text` is the table, where it was read before, and `tokens` are its rows, where they were made.
    A model without weights can only be planned for.
    """
    from memfit.data import read_table, tokenize
    from memfit.engine.half_on_cpu import half_on_cpu
    from memfit.models.loading import load_settings

    if text is None:
        with doing(t("reading the table …")):
            text = read_table(config.data)
    arguments = arguments_of(config, text.labels, output_dir)
    scoring = scoring_of_run(config, text, arguments)
    class_weights = class_weights_of_run(config, text)
    if kind_of(arguments.device) == "cpu":
        with doing(t("trying half precision on this CPU, which is done once …")):
            half_on_cpu()
    model = config.model if has_weights else replace(config.model, from_scratch=True)
    settings, tokenizer = load_settings(model, text.labels)
    if tokens is None:
        rows = f"{len(text.train) + len(text.validation):,}"
        with doing(t("tokenizing {rows} rows …", rows=rows)):
            tokens = tokenize(text, tokenizer, config.data.max_length)
    return Prepared(
        config=config,
        text=text,
        tokens=tokens,
        settings=settings,
        tokenizer=tokenizer,
        arguments=arguments,
        scoring=scoring,
        class_weights=class_weights,
        gpu=gpu,
        place=place,
    )


def budget_of_rank(prepared: Prepared, ranks: LaunchedRank) -> int:
    """The budget of this rank in bytes; ranks on one device share what is free of it."""
    from memfit.planner.this_machine import budget_bytes

    device = prepared.arguments.device
    own_bytes = budget_bytes(device, parse_budget(prepared.config.budget))
    if kind_of(device) != "cpu" and not cards_are_shared():
        return own_bytes
    return min(own_bytes, budget_bytes(device, Budget()) // ranks.local_world_size)


def arguments_of(config: RunConfig, labels: LabelSpace, output_dir: Path) -> TrainingArguments:
    """The Trainer's arguments for a run on rows with these labels."""
    arguments = training_arguments(
        config.training,
        output_dir,
        best_metric(labels.task)[0],
        head_only=config.model.freeze == "encoder",
        task=labels.task,
    )
    if config.early_stopping is not None and not arguments.load_best_model_at_end:
        raise ConfigError(
            t(
                "--early-stopping goes back to the best model, so it needs evaluations "
                "(--eval-strategy epoch or steps) and --load-best-model-at-end"
            )
        )
    return arguments


def prepare_to_plan(
    config: RunConfig, gpu: str | None = None, place: CardPlace | None = None
) -> Prepared:
    """Prepares a run that is only planned: a config.json and a tokenizer are enough of a model."""
    from memfit.models.loading import check_positions
    from memfit.planner.pricing.traced_setup import build_model, full_config

    config = config.asked
    check_training(config.training)
    _named_card(gpu)  # a name that no card has is refused before the table is read
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(config, Path(folder), gpu=gpu, place=place, has_weights=False)
    prepared = _on_ranks(prepared, _ranks_to_plan(config.gpus, gpu))
    with doing(t("planning …")):
        whole = replace(prepared.workload, lora=None, freeze=None)
        model = build_model(whole, full_config(whole))
    check_positions(model, config.data.max_length, config.model.model)
    return prepared


def _on_ranks(prepared: Prepared, ranks: int) -> Prepared:
    """The task of one of several ranks; on a CPU they share the computer's memory."""
    prepared = replace(prepared, ranks=ranks)
    if ranks == 1 or prepared.task.card is not None:
        return prepared
    import torch

    from memfit.planner.this_machine import budget_bytes

    free_bytes = budget_bytes(torch.device("cpu"), Budget())
    return replace(prepared, most_bytes=free_bytes // ranks)


def _ranks_to_plan(gpus: str | None, gpu: str | None) -> int:
    """How many cards a plan is for; of a card that is not here there may be any number."""
    if gpus is None:
        return 1
    if gpu is None or gpus == "auto":
        return count_of(gpus)
    return int(gpus)


def _named_card(
    gpu: str | None, place: CardPlace | None = None
) -> DeviceProfile | torch.device | None:
    """The card of that name, or this machine's CPU; None where none is named."""
    if gpu is None:
        return None
    if gpu.strip().lower() == "cpu":
        import torch

        return torch.device("cpu")
    from memfit.memory.cards import find_card

    return find_card(gpu, place)


def stored_options(run: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, CardPlace | None]:
    """The run a plan's file is for, as options, the card it was made for, and where that is."""
    from memfit.memory.cards import CardPlace

    options: dict[str, Any] = {}
    for key, value in run.items():
        if key in ("data", "model", "training") and isinstance(value, Mapping):
            options |= value
        elif key not in ("gpu", "place", "output_dir", "plan"):
            options[key] = value
    gpu, place = run.get("gpu"), run.get("place")
    there = CardPlace.read(place) if isinstance(place, Mapping) else None
    return options, None if gpu is None else str(gpu), there


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


def as_json(prepared: Prepared, planning: Planning, other: Alternatives | None) -> dict[str, Any]:
    """The plan, the others, and what else could be done."""
    price = planning.chosen.price
    assert price is not None
    seconds = run_seconds(prepared.workload, price)
    return {
        **_about(prepared),
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


def missing_json(prepared: Prepared, error: NothingFitsError) -> dict[str, Any]:
    """JSON for when nothing fits: the smallest plan, what is missing, what would help."""
    return {
        **_about(prepared),
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
        "notes": [one.sentence() for one in error.notes],
    }


def checked_json(prepared: Prepared, checked: Checked) -> dict[str, Any]:
    """Whether a plan fits, and by how much not."""
    return {
        **_about(prepared),
        "fits": checked.fits,
        "missing_bytes": checked.missing_bytes,
        "changed": list(checked.changed),
        "plan": checked.plan.as_json(),
    }


def _about(prepared: Prepared) -> dict[str, Any]:
    return {
        "model": prepared.config.model.model,
        "card": "cpu" if prepared.task.card is None else prepared.task.card.name,
        "budget_bytes": prepared.task.budget_bytes,
        "rows": len(prepared.workload.lengths),
        "ranks": prepared.workload.ranks,
        "effective_batch": prepared.workload.effective_rows,
        "steps_per_epoch": prepared.workload.steps_per_epoch,
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


@dataclass(kw_only=True)
class Choosing:
    """Chooses the plan of a run: the one given, the one it was begun by, or the fastest."""

    config: RunConfig
    task: PlanTask
    folder: RunFolder
    say: Say
    given: Plan | None = None
    named: Mapping[str, Any] = field(default_factory=dict)
    """The plan that run.toml names, with a digest of the settings it was made for."""
    checkpoint: Path | None = None
    """The checkpoint a resumed run goes on from."""
    kept: bool = False
    """Whether the plan is that of an earlier run of the same task."""
    _pricer: Pricer | None = None

    def choose(self) -> Plan | None:
        """The plan; None where memory cannot be predicted and no budget was promised."""
        from memfit.planner.plans import Plan

        try:
            if self.checkpoint is not None and self.folder.plan.is_file():
                return self._resumed()
            if self.given is not None:
                return self._fitting(self.given, t("the plan given"))
            if self.config.plan is not None:
                return self._fitting(Plan.read(Path(self.config.plan)), self.config.plan)
            return self._named() or self._made()
        except TraceError as error:
            if self.task.budget != Budget():
                raise  # a promise that cannot be checked is not made
            self.say(fact_line("note", t("memory cannot be predicted: {error}", error=error)))
            return None

    def _made(self) -> Plan:
        from memfit.planner.this_machine import choose

        found = choose(self.task, folder=self.folder.path, pricer=self._pricer)
        self._pricer, self.kept = found.pricer, found.kept
        for note in found.notes:
            self.say(fact_line("note", note.sentence(language())))
        return found.plan

    def _named(self) -> Plan | None:
        """The plan of the run that is run again; None where it is not for this task, or misses."""
        from memfit.planner.plans import Plan, changes, check, digest_of
        from memfit.planner.this_machine import kept_plan

        if not self.named:
            return None
        tables, task = dict(self.named), self.task
        same_settings = tables.pop(_SETTINGS, "") == self.config.settings_digest()
        plan = Plan.from_tables(tables, "[plan]")
        # What is free for `auto` is never the same twice.
        now = replace(
            digest_of(task.workload, task.budget_bytes, task.card),
            budget_bytes=plan.digest.budget_bytes,
        )
        why = "; ".join(changes(plan.digest, now)) if same_settings else t("other settings")
        if not why:
            kept = kept_plan(task)
            if kept is not None and kept.candidate == plan.candidate:
                return kept
            checked = check(plan, task)
            if checked.fits:
                return checked.plan
            why = does_not_fit_sentence(checked, "[plan]")
        self.say(
            fact_line("note", t("planned anew, not by [plan] of the settings: {why}", why=why))
        )
        return None

    def _fitting(self, plan: Plan, name: str) -> Plan:
        from memfit.planner.plans import check

        checked = check(plan, self.task)
        if not checked.fits:
            raise DoesNotFitError(does_not_fit_sentence(checked, name))
        return checked.plan

    def _resumed(self) -> Plan:
        """The plan it was begun by; where it no longer fits, with smaller micro-batches."""
        from memfit.planner.plans import Plan, check
        from memfit.planner.search import fit_strategies

        plan = Plan.read(self.folder.plan)
        candidate = plan.candidate
        if self.task.workload.ranks == 1:  # checkpoints are whole, however many ranks wrote them
            alone = tuple(one for one in plan.strategies if not one.effects.divides_weights)
            candidate = replace(candidate, strategies=alone)
        recorded = self._recorded()
        if recorded is not None:
            candidate = replace(candidate, micro_batching=recorded)
        plan = replace(plan, candidate=candidate)
        checked = check(plan, self.task)
        return checked.plan if checked.fits else fit_strategies(self.task, plan.strategies)

    def _recorded(self) -> MicroBatching | None:
        """The micro-batches of the checkpoint, unless there is another budget now."""
        from memfit.training.checkpoints import recorded_micro_batching

        if self.checkpoint is None or not self.folder.config.is_file():
            return None
        if RunConfig.from_toml(self.folder.config).budget != self.config.budget:
            return None
        return recorded_micro_batching(self.checkpoint)


_SETTINGS = "settings"


def naming(config: RunConfig, plan: Plan | None) -> RunConfig:
    """The settings with the plan that was made for them, so that a rerun trains by it."""
    if plan is None or config.plan is not None:
        return config
    return replace(config, named_plan={_SETTINGS: config.settings_digest(), **plan.tables()})


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
