"""A training run: read -> plan -> train -> evaluate -> save -> report.

`train_classifier` opens the output folder and the ranks; `_run` is the path itself, a stage a line:

    Prepared     the table's rows, the arguments, the task a plan is made for     prepare.py
    ChosenPlan   the plan given, cached or made                                   choose_plan.py
    Training     a BudgetTrainer that has trained by the plan, and its observers
    Evaluation   metrics on the validation rows                                   records/
    RunResult    the folder: model, evaluation, plan, log, summary, report        save.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig
from memfit.config.files import atomic_writer
from memfit.config.training_fields import check_training
from memfit.errors import OutputError
from memfit.i18n import language, t
from memfit.memory.device import has_cuda, kind_of, name_of
from memfit.models.loading import check_model_folder, start_reading_weights
from memfit.records.evaluation import (
    Evaluation,
    compute_metrics_for,
    evaluate_predictions,
    worst_mistakes,
)
from memfit.records.results import (
    OutputClaim,
    RankFigures,
    RunFolder,
    RunSummary,
    claim_output_folder,
    read_evaluation,
    read_summary,
    write_evaluation,
    write_summary,
)
from memfit.report.terminal import fact_line
from memfit.run import announcements
from memfit.run.choose_plan import ChosenPlan, PlanSource, choose_plan, naming
from memfit.run.launching import joined
from memfit.run.preloading import load_libraries
from memfit.run.prepare import Prepared, budget_of_rank, prepare
from memfit.run.resume import (
    last_checkpoint,
    resume_command,
    trained_seconds,
    with_absolute_paths,
)
from memfit.run.save import command_in_errors, model_saved_on_failure, save_model
from memfit.run.summary import summarize
from memfit.waiting import doing, telling

if TYPE_CHECKING:
    from memfit.data import TextData, TokenizedData
    from memfit.engine.ranks import Ranks
    from memfit.planner.plan import Plan
    from memfit.run.callbacks import Observers
    from memfit.training.checkpoints import CheckpointSearch
    from memfit.training.trainer import BudgetTrainer


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended and the folder that holds it."""

    output_dir: Path
    summary: RunSummary
    evaluation: Evaluation

    @property
    def metrics(self) -> dict[str, float]:
        """The best model's metrics on the validation rows."""
        return dict(self.summary.metrics)

    def __repr__(self) -> str:
        figures = [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        return f"RunResult({', '.join([*figures, str(self.output_dir)])})"

    def _repr_html_(self) -> str:
        from memfit.report.notebook import notebook_html

        return notebook_html(self)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What was asked for, the folder it is written to, and the ranks that take part."""

    config: RunConfig
    claim: OutputClaim
    group: Ranks
    source: PlanSource
    resumed: CheckpointSearch | None
    """The checkpoint a resumed run goes on from, and those passed over."""
    callbacks: tuple[Any, ...]
    say: Callable[[Any], None]
    quiet: bool
    on_cpu: bool
    seconds: dict[str, float] = field(default_factory=dict)
    """The time of each stage, filled in as it ends."""

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage."""
        started = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class Training:
    """A trainer with the plan it trains by, and the callbacks that observe it."""

    trainer: BudgetTrainer
    chosen: ChosenPlan
    observers: Observers


def train_classifier(
    config: RunConfig,
    *,
    resume: bool = False,
    quiet: bool = False,
    watch: announcements.Watcher | None = None,
    callbacks: Sequence[Any] = (),
    plan: Plan | None = None,
) -> RunResult:
    """Reads, plans, trains, evaluates, saves; a run that fails early leaves nothing behind."""
    if config.output_dir is None:
        raise OutputError("no output folder given; name one with --output-dir")
    config = with_absolute_paths(config)
    check_model_folder(config.model)
    check_training(config.training)
    folder = Path(str(config.output_dir))
    on_cpu = any(config.training.get(name) for name in ("use_cpu", "no_cuda"))
    with joined(on_cpu=on_cpu) as group, contextlib.ExitStack() as held:
        quiet = quiet or not group.is_first
        say = announcements.voice(quiet)
        if resume and (finished := group.share(lambda: _finished(folder))):
            done = t(
                "the run in {folder} has already finished; nothing is left to do", folder=folder
            )
            say(done)
            return finished
        held.enter_context(telling(quiet=quiet))
        claimed = claim_output_folder(folder, resume=resume)
        claim = group.share(lambda: held.enter_context(claimed))
        if group.is_first:
            held.enter_context(announcements.followed(claim, watch))
        held.enter_context(command_in_errors(claim))
        start_reading_weights(config.model)
        resumed = None
        if resume:
            with doing(t("loading libraries …")):
                resumed = group.share(lambda: last_checkpoint(claim.folder, say))
        source = PlanSource(
            config=config.asked,
            folder=claim.folder,
            given=plan,
            named=config.named_plan,
            checkpoint=None if resumed is None else resumed.good,
        )
        return _run(
            TrainingRun(
                config=config.asked, claim=claim, group=group, source=source, resumed=resumed,
                callbacks=tuple(callbacks), say=say, quiet=quiet, on_cpu=on_cpu,
            )
        )  # fmt: skip


def _run(run: TrainingRun) -> RunResult:
    """The path of a run."""
    started = time.perf_counter()
    text = read(run)
    with announcements.no_progress_bars():
        prepared = tokenize(run, text)
        chosen = plan(run, prepared)
        training = train(run, prepared, chosen)
        evaluation = evaluate(run, prepared, training)
        save(run, prepared, training, evaluation)
    summary = summary_of(run, prepared, training, evaluation, started)
    del training  # a process that ends with pinned memory ends seconds later
    return report(run, summary, evaluation)


def finished_run(folder: Path) -> RunResult:
    """The result that lies in a folder."""
    found = _finished(folder)
    if found is None:
        raise OutputError("there is no finished run in {folder}", folder=folder)
    return found


def _finished(folder: Path) -> RunResult | None:
    """The result of a run that came to its end; the summary is written after all else."""
    from memfit.report.page import write_report

    run = RunFolder(folder)
    evaluated = read_evaluation(folder) if run.summary.is_file() else None
    if evaluated is None:
        return None
    if not run.report.is_file():
        write_report(folder)
    return RunResult(output_dir=folder, summary=read_summary(folder), evaluation=evaluated[0])


# ---- the stages ----


def read(run: TrainingRun) -> TextData:
    """Reads the table, on the first rank of each machine, and loads the libraries."""
    text: TextData | None = None
    with run.group.agreed():
        if run.group.is_first_here:
            with run.timed("data"), doing(t("reading the table …")):
                from memfit.data import read_table

                text = read_table(run.config.data)
        with run.timed("import"), doing(t("loading libraries …")):
            load_libraries(card=not run.on_cpu)
    return run.group.from_first_here(text)


def tokenize(run: TrainingRun, text: TextData) -> Prepared:
    """Tokenizes the rows, on the first rank of each machine; what every plan has in common."""
    group, folder = run.group, run.claim.folder.checkpoints_dir
    with run.timed("load"):
        prepared: Prepared | None = None
        tokens: TokenizedData | None = None
        with group.agreed():
            if group.is_first_here:
                prepared = prepare(run.config, folder, text)
                tokens = prepared.tokens if group.is_alone else prepared.tokens.on_disk()
        tokens = group.from_first_here(tokens)
        with group.agreed():
            if prepared is None:
                prepared = prepare(run.config, folder, text, tokens=tokens)
    assert prepared is not None
    if group.is_alone:
        return prepared
    with group.agreed():  # one plan runs on all ranks: it is made for the smallest budget
        own_bytes = budget_of_rank(prepared, group)
    return dataclasses.replace(prepared, most_bytes=min(group.gathered(own_bytes)))


def plan(run: TrainingRun, prepared: Prepared) -> ChosenPlan:
    """The plan for the run's task; rank 0 chooses it."""

    def choose() -> ChosenPlan:
        chosen = choose_plan(run.source, prepared.task)
        if chosen.plan is None:
            return chosen
        signed = prepared.signed(dataclasses.replace(chosen.plan, args=None))
        return dataclasses.replace(chosen, plan=signed)

    with run.timed("plan"), doing(t("planning …")):
        chosen = run.group.share(choose)
    for note in chosen.notes:
        run.say(fact_line("note", note))
    if chosen.plan is None:
        return chosen
    with_args = dataclasses.replace(chosen.plan, args=prepared.arguments)
    return dataclasses.replace(chosen, plan=with_args)


def train(run: TrainingRun, prepared: Prepared, chosen: ChosenPlan) -> Training:
    """Trains by the plan."""
    run.group.share(lambda: _write_settings(run, chosen.plan))
    observers = _observers(run, prepared)
    trainer = _trainer(run, prepared, chosen, observers)
    training = Training(trainer=trainer, chosen=chosen, observers=observers)
    announcements.announce(run, prepared, training)
    observers.record.begin(summarize(run, prepared, training))
    run.claim.keep()
    checkpoint: Any = trainer.args.resume_from_checkpoint
    if run.resumed is not None:
        checkpoint = run.resumed if run.resumed.good is not None else None
        run.say(
            t("resuming from the last checkpoint, {name}", name=run.resumed.good.name)
            if run.resumed.good is not None
            else t("no checkpoint was written yet; starting from the beginning")
        )
    saved = model_saved_on_failure(trainer, run.claim, prepared.scoring)
    try:
        with saved, run.timed("train"), doing(""), observers.stop.listening():
            trainer.train(resume_from_checkpoint=checkpoint or None)
    except KeyboardInterrupt:
        stopped = t(
            "stopped at step {step} of {steps}; go on with: {command}",
            step=trainer.state.global_step,
            steps=trainer.state.max_steps,
            command=resume_command(run.claim.path),
        )
        run.say(stopped)
        raise
    finally:
        observers.probe.close()
    return training


def _write_settings(run: TrainingRun, made: Plan | None) -> None:
    """What --resume needs, before there is a folder of checkpoints: a run may be killed."""
    with atomic_writer(run.claim.folder.config) as file:
        file.write(naming(run.config, made).to_toml())
    if made is not None:
        made.write(run.claim.folder.plan, language())


def _observers(run: TrainingRun, prepared: Prepared) -> Observers:
    from memfit.run import callbacks
    from memfit.training.progress import MemfitProgress

    earlier_seconds = trained_seconds(run.claim.path, run.source.checkpoint)
    # On a CPU the bar shows the whole process, the budget counts tensors: no match.
    on_cpu = kind_of(prepared.arguments.device) == "cpu"
    shown_bytes = None if on_cpu else prepared.task.budget_bytes
    patience = run.config.early_stopping
    return callbacks.Observers(
        record=callbacks.RecordRun(run.claim.path, earlier_seconds=earlier_seconds),
        stop=callbacks.StopAfterStep(run.say, run.group),
        stop_early=None if patience is None else callbacks.StopEarly(patience),
        bar=None
        if run.quiet
        else MemfitProgress(budget_bytes=shown_bytes, console=announcements.plain_console()),
    )


def _trainer(
    run: TrainingRun,
    prepared: Prepared,
    chosen: ChosenPlan,
    observers: Observers,
) -> BudgetTrainer:
    import transformers.trainer
    from transformers import PrinterCallback, ProgressCallback, set_seed

    from memfit.engine.micro_batches import MicroBatching
    from memfit.memory.out_of_memory import free_memory
    from memfit.models.loading import load_weights
    from memfit.planner.task import user_set_of
    from memfit.training.trainer import BudgetTrainer

    config, labels, arguments = run.config, prepared.text.labels, prepared.arguments
    free_memory(arguments.device)
    with run.timed("load"), doing(t("loading the weights …")):
        set_seed(arguments.seed)  # the head's first weights are random
        with run.group.agreed():
            model = load_weights(
                config.model, prepared.settings, prepared.tokenizer, config.data.max_length
            )
        trainer = BudgetTrainer(
            model,
            arguments,
            budget=config.budget,
            plan=chosen.plan,
            micro_batching=None if chosen.plan is not None else MicroBatching(),
            user_set=user_set_of(config),
            on_nan=config.on_nan,
            saves_model=True,
            say_adjustment=(lambda _: None) if run.quiet else None,
            class_weights=prepared.class_weights,
            train_dataset=prepared.tokens.train,
            eval_dataset=prepared.tokens.validation,
            processing_class=prepared.tokenizer,
            compute_metrics=compute_metrics_for(labels.task, labels.names, prepared.scoring),
            callbacks=[*observers.in_order(), *run.callbacks],
        )
    stock_bars = [PrinterCallback, ProgressCallback]
    if not run.group.is_alone:  # a notebook's own bar cannot be drawn by a rank
        stock_bars.append(transformers.trainer.DEFAULT_PROGRESS_CALLBACK)
    for stock_bar in stock_bars:
        trainer.remove_callback(stock_bar)
    return trainer


def evaluate(run: TrainingRun, prepared: Prepared, training: Training) -> Evaluation:
    """Scores the best model on the validation rows: all ranks predict, rank 0 scores."""
    from memfit.engine.micro_batches import logits_and_labels

    trainer, text = training.trainer, prepared.text

    def score() -> Evaluation:
        evaluation = evaluate_predictions(logits, labels, text.labels, prepared.scoring)
        tuned = dataclasses.replace(prepared.scoring, threshold=evaluation.threshold)
        mistakes = worst_mistakes(logits, labels, text.labels, text.validation["text"], tuned)
        write_evaluation(run.claim.path, evaluation, mistakes)
        return evaluation

    saved = model_saved_on_failure(trainer, run.claim, prepared.scoring, ended=True)
    with saved, run.timed("evaluate"):
        known = trainer.known_predictions()
        logits, labels = known or logits_and_labels(trainer.predict(prepared.tokens.validation))
        return run.group.share(score)


def save(run: TrainingRun, prepared: Prepared, training: Training, evaluation: Evaluation) -> None:
    """Saves the best model, on rank 0."""
    weights = training.trainer.setup.whole_weights()
    tuned = dataclasses.replace(prepared.scoring, threshold=evaluation.threshold)
    with run.timed("save"), doing(t("saving the model …")):
        run.group.share(lambda: save_model(training.trainer, run.claim.path, tuned, weights))


def summary_of(
    run: TrainingRun, prepared: Prepared, training: Training, evaluation: Evaluation, started: float
) -> RunSummary:
    """The summary of the whole run, with the figures of all ranks."""
    trainer, observers = training.trainer, training.observers
    ranks: tuple[RankFigures, ...] = ()
    if not run.group.is_alone:
        peak = observers.probe.peak(trainer.args.device)
        figures = RankFigures(
            rank=run.group.number,
            device=name_of(trainer.args.device),
            peak_bytes=None if peak is None else peak.device_bytes,
            step_seconds=round(observers.timed.seconds, 3),
            tokens=trainer.guard.tokens,
        )
        ranks = tuple(run.group.gathered(figures))
    # A resumed run took what its sessions took together.
    earlier = observers.record.earlier_seconds
    run.seconds["train"] += earlier
    run.seconds["total"] = time.perf_counter() - started + earlier
    return run.group.share(lambda: summarize(run, prepared, training, evaluation, ranks))


def report(run: TrainingRun, summary: RunSummary, evaluation: Evaluation) -> RunResult:
    """Writes the summary, by which the run has finished, and the report."""
    from memfit.report.page import write_report
    from memfit.strategies.offload.host_memory import give_back_unused

    if run.group.is_first:
        write_summary(run.claim.path, summary)
        with doing(t("writing the report …")):
            if has_cuda() and not run.on_cpu:
                gc.collect()
                give_back_unused()
            write_report(run.claim.path)
    return RunResult(output_dir=run.claim.path, summary=summary, evaluation=evaluation)
