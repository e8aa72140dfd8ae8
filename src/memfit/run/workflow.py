"""One run from the table to the result folder."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig
from memfit.config.files import atomic_writer, is_disk_problem, plain, staged_files, why_not_written
from memfit.config.training_fields import check_training
from memfit.errors import (
    DeviceLostError,
    LossError,
    OutputError,
    RunStoppedError,
    SaveError,
)
from memfit.i18n import language, t
from memfit.memory.device import is_cuda, kind_of
from memfit.models.loading import check_model_folder, start_reading_weights
from memfit.records.evaluation import (
    Evaluation,
    compute_metrics_for,
    evaluate_predictions,
    worst_mistakes,
)
from memfit.records.results import (
    MemorySummary,
    OutputClaim,
    RankFigures,
    RunFolder,
    RunSummary,
    claim_output_folder,
    config_digest,
    kept_messages,
    read_evaluation,
    read_summary,
    versions,
    write_evaluation,
    write_summary,
)
from memfit.records.run_warnings import RunWarning, answer_warnings, data_warnings
from memfit.records.scoring import Scoring, keep_scoring
from memfit.report import terminal
from memfit.report import terminal as announce
from memfit.run import announcements, preloading
from memfit.run.prepare import (
    Choosing,
    Prepared,
    budget_of_rank,
    last_checkpoint,
    naming,
    prepare,
    with_absolute_paths,
)
from memfit.run.rank_group import RankError, RankGroup, joined
from memfit.units import format_both, percent
from memfit.waiting import doing, telling

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from memfit.data import TextData, TokenizedData
    from memfit.memory.components import MemoryPeak
    from memfit.planner.plans import Plan
    from memfit.run.callbacks import StopEarly
    from memfit.training.checkpoints import Search
    from memfit.training.trainer import BudgetTrainer


def predictions_of(trainer: BudgetTrainer, tokens: TokenizedData) -> tuple[Any, Any]:
    """Logits and labels of the validation rows; all ranks predict together."""
    from memfit.engine.micro_batches import logits_and_labels

    known = trainer.known_predictions()
    return known or logits_and_labels(trainer.predict(tokens.validation))


def evaluate_trained(
    logits: Any, labels: Any, text: TextData, scoring: Scoring, folder: Path
) -> Evaluation:
    """Metrics and the worst mistakes on the validation rows, written to evaluation.json."""
    evaluation = evaluate_predictions(logits, labels, text.labels, scoring)
    scoring = dataclasses.replace(scoring, threshold=evaluation.threshold)
    mistakes = worst_mistakes(logits, labels, text.labels, text.validation["text"], scoring)
    write_evaluation(folder, evaluation, mistakes)
    return evaluation


def save_model(
    trainer: BudgetTrainer, target: Path, scoring: Scoring, weights: dict[str, Any] | None = None
) -> None:
    """The best model as pipeline() wants it: adapters merged, tokenizer beside it.

    `weights` are all of a model that is divided among the ranks.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    adapted = hasattr(model, "merge_and_unload")
    if adapted:
        trainer.masters.widen()
        model = model.merge_and_unload()
    tokenizer: Any = trainer.processing_class
    with staged_files(target) as folder:
        if adapted or not trainer.masters.export(folder):
            checkpoint = None if adapted else _checkpoint_of(trainer)
            if checkpoint is None or not _linked(checkpoint, folder):
                model.save_pretrained(folder, state_dict=weights)
        keep_scoring(folder / "config.json", scoring)
        for file in folder.glob("*.safetensors"):
            # Written as a private file; the result should be as readable as the rest of it.
            file.chmod((folder / "config.json").stat().st_mode)
        tokenizer.save_pretrained(folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))


def _checkpoint_of(trainer: BudgetTrainer) -> Path | None:
    """The checkpoint that holds the weights as they are now, whole and under its name."""
    try:
        trainer.checkpoints.settle()
    except RunStoppedError:
        return None  # said once the model is saved
    best = trainer.state.best_model_checkpoint
    if best and trainer.args.load_best_model_at_end:
        return Path(best)
    return trainer.checkpoints.held()


def _linked(checkpoint: Path, folder: Path) -> bool:
    """Gives the files of a checkpoint's model a second name; whether that could be done.

    Nothing is written twice. Where the disk has no links the model is saved once more.
    """
    weights = checkpoint / "model.safetensors"
    config = checkpoint / "config.json"
    if not weights.is_file() or weights.is_symlink() or not config.is_file():
        return False
    try:
        shutil.copyfile(config, folder / config.name)
        os.link(weights, folder / weights.name)
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended and where it lies."""

    output_dir: Path
    summary: RunSummary
    evaluation: Evaluation

    @property
    def metrics(self) -> dict[str, float]:
        """The best model's metrics on the validation rows."""
        return dict(self.summary.metrics)

    def _repr_html_(self) -> str:
        from memfit.report.notebook import notebook_html

        return notebook_html(self)


@dataclass
class _Clock:
    """Seconds of each part of the run."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds what the block takes."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def train_classifier(
    config: RunConfig,
    *,
    resume: bool = False,
    quiet: bool = False,
    watch: bool = False,
    callbacks: Sequence[Any] = (),
    plan: Plan | None = None,
) -> RunResult:
    """Reads, trains, evaluates and saves; a run that fails early leaves nothing behind."""
    from memfit.run.announcements import followed

    if config.output_dir is None:
        raise OutputError(t("no output folder given; name one with --output-dir"))
    config = with_absolute_paths(config)
    check_model_folder(config.model)
    check_training(config.training)
    folder = Path(str(config.output_dir))
    with joined(on_cpu=_on_cpu(config)) as group, contextlib.ExitStack() as held:
        quiet = quiet or not group.is_first
        say = announcements.voice(quiet)
        if resume and (finished := group.share(lambda: _finished(folder))):
            say(
                t(
                    "the run in {folder} has already finished; nothing is left to do",
                    folder=folder,
                )
            )
            return finished
        held.enter_context(telling(quiet=quiet))
        claimed = claim_output_folder(folder, resume=resume)
        claim = group.share(lambda: held.enter_context(claimed))
        if group.is_first:
            held.enter_context(followed(claim, watch=watch))
        run = _Run(
            config.asked, claim, say, quiet, resume, tuple(callbacks), group, given_plan=plan
        )
        run.named_plan = config.named_plan
        return run.finish()


def _on_cpu(config: RunConfig) -> bool:
    """Whether the run was asked to leave the GPU alone."""
    return any(config.training.get(name) for name in ("use_cpu", "no_cuda"))


def finished_run(folder: Path) -> RunResult:
    """The result that lies in a folder."""
    found = _finished(folder)
    if found is None:
        raise OutputError(t("there is no finished run in {folder}", folder=folder))
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


def _give_back_pinned_memory() -> None:
    """What the strategies kept on the host: a process that ends with it ends seconds later."""
    from memfit.strategies.offload.host_memory import give_back_unused

    gc.collect()
    give_back_unused()


@dataclass
class _Run:
    """The state of one run while it lasts."""

    config: RunConfig
    claim: OutputClaim
    say: Callable[[Any], None]
    quiet: bool
    resume: bool
    callbacks: tuple[Any, ...]
    group: RankGroup
    clock: _Clock = field(default_factory=_Clock)
    given_plan: Plan | None = None
    named_plan: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    """None where memory could not be predicted."""
    found: Search | None = None
    """The checkpoint a resumed run goes on from."""
    prepared: Prepared = field(init=False)
    stop_early: StopEarly | None = None
    ranks: tuple[RankFigures, ...] = ()
    choosing: Choosing = field(init=False)

    @property
    def arguments(self) -> TrainingArguments:
        """As the user gave them."""
        return self.prepared.arguments

    @property
    def predicted(self) -> MemoryPeak | None:
        """The highest moment of the run, as planned: what the process will hold then."""
        price = self.plan.price if self.plan is not None else None
        if price is None or not is_cuda(self.arguments.device):
            return None if price is None else price.peak
        return dataclasses.replace(price.peak, device_bytes=price.peak.held_bytes)

    def finish(self) -> RunResult:
        """Everything, in order; what stops it says how to go on."""
        try:
            with self.group.failing_together():
                return self._finish()
        except RunStoppedError as error:
            raise self._with_command(error) from error
        except RankError as error:
            if not self.claim.kept:
                raise
            stopped = RunStoppedError(error.reason, self._last_good())
            stopped.exit_code = error.exit_code
            stopped.model_in = getattr(error.__cause__, "model_in", None)
            raise self._with_command(stopped) from error
        except Exception as error:
            if not is_disk_problem(error):
                raise
            what = t(
                "the run could not be written: {why}", why=why_not_written(error, self.claim.path)
            )
            raise self._with_command(SaveError(what, self._last_good())) from error

    def _with_command(self, error: RunStoppedError) -> RunStoppedError:
        again = f"memfit train --resume --output-dir {shlex.quote(str(self.claim.path))}"
        error.resume_with = again + " --on-nan skip" * isinstance(error, LossError)
        return error

    def _last_good(self) -> Path | None:
        from memfit.training.checkpoints import newest_listed

        return newest_listed(self.claim.folder.checkpoints_dir)

    def _finish(self) -> RunResult:
        started = time.perf_counter()
        start_reading_weights(self.config.model)
        if self.resume:
            with doing(t("loading libraries …")):
                folder, say = self.claim.folder, self.say
                self.found = self.group.share(lambda: last_checkpoint(folder, say))
        read: TextData | None = None
        with self.group.agreed():
            if self.group.is_first_here:
                with self.clock.measure("data"), doing(t("reading the table …")):
                    read = self._read()
            with self.clock.measure("import"), doing(t("loading libraries …")):
                preloading.load_libraries(card=not _on_cpu(self.config))
        text = self.group.from_first_here(read)
        with announcements.no_progress_bars():
            self._prepare(text)
            tokens = self.prepared.tokens
            trainer = self._trained(text)
            if not self.group.is_alone:
                self.ranks = tuple(self.group.gathered(self._figures(trainer)))
            with self._sealed_whatever_happens(trainer):
                with self._model_kept(trainer, ended=True), self.clock.measure("evaluate"):
                    predicted = predictions_of(trainer, tokens)
                weights = trainer.setup.whole_weights()
                evaluation = self.group.share(
                    partial(self._saved, trainer, text, predicted, weights)
                )
                del weights
        # A resumed run took what its sessions took together.
        self.clock.seconds["train"] += self.elapsed.earlier_seconds
        total = time.perf_counter() - started + self.elapsed.earlier_seconds
        self.clock.seconds["total"] = total
        summarize = partial(self._summary, trainer, text, tokens, evaluation)
        summary = self.group.share(summarize)
        del summarize, trainer
        if self.group.is_first:
            self._write(summary)
        return RunResult(output_dir=self.claim.path, summary=summary, evaluation=evaluation)

    def _figures(self, trainer: BudgetTrainer) -> RankFigures:
        peak = self.probe.peak(trainer.args.device)
        return RankFigures(
            rank=self.group.ranks.rank,
            device=announcements.device_name(trainer.args.device),
            peak_bytes=None if peak is None else peak.device_bytes,
            step_seconds=round(self.timed.seconds, 3),
            waiting_seconds=round(trainer.ranks.waited_seconds, 3),
            tokens=trainer.guard.tokens,
        )

    def _saved(
        self,
        trainer: BudgetTrainer,
        text: TextData,
        predicted: tuple[Any, Any],
        weights: dict[str, Any] | None,
    ) -> Evaluation:
        """Evaluates what the trained model predicts, and saves it."""
        scoring = self.prepared.scoring
        with self._model_kept(trainer, ended=True), self.clock.measure("evaluate"):
            evaluation = evaluate_trained(*predicted, text, scoring, self.claim.path)
        with self.clock.measure("save"), doing(t("saving the model …")):
            tuned = dataclasses.replace(scoring, threshold=evaluation.threshold)
            save_model(trainer, self.claim.path, tuned, weights)
            self._settle(trainer)
        return evaluation

    def _write(self, summary: RunSummary) -> None:
        from memfit.report.page import write_report

        write_summary(self.claim.path, summary)
        with doing(t("writing the report …")):
            if is_cuda(self.arguments.device):
                _give_back_pinned_memory()
            write_report(self.claim.path)

    @contextlib.contextmanager
    def _model_kept(self, trainer: BudgetTrainer, *, ended: bool = False) -> Iterator[None]:
        """Saves the model of a training that has `ended` or done all steps, if this fails."""
        try:
            yield
        except (LossError, DeviceLostError):
            raise  # there is no model worth keeping, or nothing to read it from
        except Exception as error:
            if not (ended or trainer.is_trained) or not self._is_saved(trainer):
                raise
            if isinstance(error, RunStoppedError):
                error.model_in = self.claim.path
                raise
            what = f"{type(error).__name__}: {error}"
            if is_disk_problem(error):
                what = t(
                    "the run could not be written: {why}",
                    why=why_not_written(error, self.claim.path),
                )
            stopped = RunStoppedError(what, self._last_good())
            stopped.model_in = self.claim.path
            raise stopped from error

    @contextlib.contextmanager
    def _sealed_whatever_happens(self, trainer: BudgetTrainer) -> Iterator[None]:
        """Waits for the last checkpoint where this fails, too: --resume may follow at once."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RunStoppedError):
                trainer.checkpoints.settle()
            raise

    def _settle(self, trainer: BudgetTrainer) -> None:
        """Waits for the last checkpoint, which was left unfinished to save the model beside it."""
        try:
            trainer.checkpoints.settle()
        except RunStoppedError as error:
            error.model_in = self.claim.path
            raise

    def _is_saved(self, trainer: BudgetTrainer) -> bool:
        """Tries to save the model; where that fails too, what went wrong first says more."""
        if not self.group.is_first or trainer.setup.sharded is not None:
            return False  # of a divided model, all ranks have a part, and this may be one rank's
        try:
            save_model(trainer, self.claim.path, self.prepared.scoring)
        except Exception:
            return False
        return True

    def _read(self) -> TextData:
        from memfit.data import read_table

        return read_table(self.config.data)

    def _prepare(self, text: TextData) -> None:
        """Everything that is the same for every plan, and the first plan."""
        folder = self.claim.folder.checkpoints_dir
        with self.clock.measure("load"):
            tokens: TokenizedData | None = None
            with self.group.agreed():
                if self.group.is_first_here:
                    self.prepared = prepare(self.config, folder, text)
                    tokens = self.prepared.tokens
                    tokens = tokens if self.group.is_alone else tokens.on_disk()
            tokens = self.group.from_first_here(tokens)
            with self.group.agreed():
                if not self.group.is_first_here:
                    self.prepared = prepare(self.config, folder, text, tokens=tokens)
        with self.clock.measure("plan"):
            with doing(t("planning …")):
                self._meet_all_budgets()
                self.choosing = Choosing(
                    config=self.config,
                    task=self.prepared.task,
                    folder=self.claim.folder,
                    say=self.say,
                    given=self.given_plan,
                    named=self.named_plan,
                    checkpoint=self.found.good if self.found is not None else None,
                )
            self.plan = self._plan()

    def _meet_all_budgets(self) -> None:
        """One plan runs on all ranks, so it is made for the rank with the least memory."""
        if self.group.is_alone:
            return
        with self.group.agreed():
            own_bytes = budget_of_rank(self.prepared, self.group.ranks)
        self.prepared = dataclasses.replace(
            self.prepared, most_bytes=self.group.smallest(own_bytes)
        )

    def _trained(self, text: TextData) -> BudgetTrainer:
        """Trains by the plan."""
        self.group.share(self._write_settings)
        trainer = self._trainer(text)
        self._announce(trainer, text, self.prepared.tokens)
        self.record.begin(self._summary(trainer, text, self.prepared.tokens, None))
        with self._model_kept(trainer), self.clock.measure("train"), doing(""):
            self._train(trainer)
        return trainer

    def _trainer(self, text: TextData) -> BudgetTrainer:
        import transformers.trainer
        from transformers import PrinterCallback, ProgressCallback, set_seed

        from memfit.engine.micro_batches import MicroBatching
        from memfit.memory.out_of_memory import free_memory
        from memfit.models.loading import load_weights
        from memfit.planner.workload import user_set_of
        from memfit.training.trainer import BudgetTrainer

        labels, max_length = text.labels, self.config.data.max_length
        tokens, arguments = self.prepared.tokens, self.arguments
        settings, tokenizer = self.prepared.settings, self.prepared.tokenizer
        free_memory(arguments.device)
        with self.clock.measure("load"), doing(t("loading the weights …")):
            set_seed(arguments.seed)  # the head's first weights are random
            with self.group.agreed():
                model = load_weights(self.config.model, settings, tokenizer, max_length)
            trainer = BudgetTrainer(
                model,
                arguments,
                budget=self.config.budget,
                plan=self.plan,
                micro_batching=None if self.plan is not None else MicroBatching(),
                user_set=user_set_of(self.config),
                on_nan=self.config.on_nan,
                saves_model=True,
                say_adjustment=(lambda _: None) if self.quiet else None,
                class_weights=self.prepared.class_weights,
                train_dataset=tokens.train,
                eval_dataset=tokens.validation,
                processing_class=tokenizer,
                compute_metrics=compute_metrics_for(
                    labels.task, labels.names, self.prepared.scoring
                ),
                callbacks=self._callbacks(kind_of(arguments.device)),
            )
        # A callback of the user's, or a tracker, may look into the last checkpoint; and where only
        # one is kept, the Trainer itself does.
        own = ("memfit.", "transformers.trainer_callback")
        looked_at = any(
            not type(one).__module__.startswith(own) for one in trainer.callback_handler.callbacks
        )
        trainer.checkpoints.seals_last_later = not looked_at and arguments.save_total_limit != 1
        stock_bars = [PrinterCallback, ProgressCallback]
        if not self.group.is_alone:  # a notebook's own bar cannot be drawn by a rank
            stock_bars.append(transformers.trainer.DEFAULT_PROGRESS_CALLBACK)
        for stock_bar in stock_bars:
            trainer.remove_callback(stock_bar)
        return trainer

    def _callbacks(self, kind: str) -> list[Any]:
        from memfit.run.callbacks import (
            KeepElapsed,
            MeasureOneStep,
            RecordRun,
            StopAfterStep,
            StopEarly,
            TimeSteps,
            elapsed_seconds,
        )
        from memfit.training.progress import MemfitProgress

        self.stop, self.probe = StopAfterStep(self.say, self.group), MeasureOneStep()
        self.timed = TimeSteps()
        self.elapsed = KeepElapsed(elapsed_seconds(self.found.good if self.found else None))
        self.record = RecordRun(self.claim.path, earlier_seconds=self.elapsed.earlier_seconds)
        # On a CPU the bar shows the whole process, the budget counts tensors: no match.
        shown_bytes = self.prepared.task.budget_bytes if kind != "cpu" else None
        bar = MemfitProgress(budget_bytes=shown_bytes, console=announcements.plain_console())
        # The time is kept before a stop ends the run.
        if self.config.early_stopping is not None:
            self.stop_early = StopEarly(self.config.early_stopping)
        # Steps are timed before others wait at their end.
        own = [self.timed, self.elapsed, self.record, self.stop, self.probe, self.stop_early]
        shown = [] if self.quiet else [bar]
        return [*shown, *(one for one in own if one is not None), *self.callbacks]

    def _plan(self) -> Plan | None:
        with doing(t("planning …")):
            plan = self.group.share(self._chosen)
        return None if plan is None else dataclasses.replace(plan, args=self.arguments)

    def _chosen(self) -> Plan | None:
        plan = self.choosing.choose()
        return self.prepared.signed(dataclasses.replace(plan, args=None)) if plan else None

    def _announce(self, trainer: BudgetTrainer, text: TextData, tokens: TokenizedData) -> None:
        """What will be done, before it is."""
        self.say(terminal.data_summary(text.counts, tokens.lengths, text.labels.task))
        if warnings := self._data_warnings(text, tokens):
            self.say(terminal.warnings_list(warnings))
        line = announce.fact_line
        self.say(line("model", announcements.model_sentence(self.config.model.model, trainer)))
        self.say(line("budget", announcements.budget_sentence(self.prepared.task)))
        if self.plan is not None:
            plan_said = announcements.plan_sentence(self.plan)
            kept = (
                t("{plan}; kept from an earlier run", plan=plan_said)
                if self.choosing.kept
                else plan_said
            )
            self.say(line("plan", kept))
        self.say(line("batch", announcements.batch_sentence(trainer)))
        if weights := self._asked_for(text.labels.names).get("class_weights"):
            self.say(line("weights", weights))
        self.say(line("metric", announcements.metric_sentence(self.prepared.scoring, trainer)))
        if self.predicted is not None:
            needs_bytes, budget_bytes = self.predicted.device_bytes, self.prepared.task.budget_bytes
            share = percent(needs_bytes / max(budget_bytes, 1))
            self.say(
                line(
                    "memory" if kind_of(trainer.args.device) == "cpu" else "gpu_memory",
                    t(
                        "{needs} at the peak by prediction, {share} of the budget",
                        needs=format_both(needs_bytes),
                        share=share,
                    ),
                )
            )

    def _write_settings(self) -> None:
        """What --resume needs, before there is a folder of checkpoints: a run may be killed."""
        with atomic_writer(self.claim.folder.config) as file:
            file.write(naming(self.config, self.plan).to_toml())
        if self.plan is not None:
            self.plan.write(self.claim.folder.plan, language())

    def _train(self, trainer: BudgetTrainer) -> None:
        self.claim.keep()
        checkpoint: Any = trainer.args.resume_from_checkpoint
        if self.found is not None:
            checkpoint = self.found if self.found.good is not None else None
            self.say(
                t("resuming from the last checkpoint, {name}", name=self.found.good.name)
                if self.found.good is not None
                else t("no checkpoint was written yet; starting from the beginning")
            )
        try:
            with self.stop.listening():
                trainer.train(resume_from_checkpoint=checkpoint or None)
        except KeyboardInterrupt:
            again = f"memfit train --resume --output-dir {self.claim.path}"
            state = trainer.state
            self.say(
                t(
                    "stopped at step {step} of {steps}; go on with: {command}",
                    step=state.global_step,
                    steps=state.max_steps,
                    command=again,
                )
            )
            raise
        finally:
            self.probe.close()

    @property
    def _weighted(self) -> bool:
        return self.prepared.class_weights is not None

    def _data_warnings(self, text: TextData, tokens: TokenizedData) -> tuple[RunWarning, ...]:
        return data_warnings(
            text.counts,
            tokens.lengths,
            text.labels.task,
            scoring=self.prepared.scoring,
            weighted=self._weighted,
        )

    def _asked_for(self, names: Sequence[str]) -> dict[str, Any]:
        """What was chosen for this training beyond the Trainer's arguments."""
        asked: dict[str, Any] = {}
        if (weights := self.prepared.class_weights) is not None:
            pairs = zip(names, weights, strict=True)
            asked["class_weights"] = ", ".join(f"{name} {weight:.4g}" for name, weight in pairs)
        if self.config.threshold is not None:
            asked["threshold"] = self.config.threshold
        if self.stop_early is not None:
            asked["early_stopping"] = self.config.early_stopping
            asked["stopped_early"] = self.stop_early.stopped_at is not None
        return asked

    def _plan_summary(self, plan: Plan) -> dict[str, Any]:
        return {**plan.as_json(), "messages": kept_messages(plan.messages())}

    def _summary(
        self,
        trainer: BudgetTrainer,
        text: TextData,
        tokens: TokenizedData,
        evaluation: Evaluation | None,
    ) -> RunSummary:
        """What is known of the run; before it has been evaluated, what it begins with."""
        total, learning = announcements.parameters(trainer)
        arguments = trainer.user_args
        best = trainer.state.best_model_checkpoint
        return RunSummary(
            model=self.config.model.model,
            task=text.labels.task,
            labels=text.labels.names,
            status="finished" if evaluation else "running",
            metrics=evaluation.metrics if evaluation else {},
            averaging=evaluation.averaging if evaluation else "",
            positive=evaluation.positive if evaluation else "",
            why=evaluation.why if evaluation else "",
            threshold=evaluation.threshold if evaluation else None,
            warnings=(
                *(answer_warnings(evaluation, weighted=self._weighted) if evaluation else ()),
                *self._data_warnings(text, tokens),
            ),
            training={
                "steps": trainer.state.global_step,
                "epochs": trainer.state.epoch,
                "effective_batch": trainer.effective_rows,
                "learning_rate": arguments.learning_rate,
                "optim": str(getattr(arguments.optim, "value", arguments.optim)),
                "seed": arguments.seed,
                "parameters": total,
                "learning_parameters": learning,
                "best_by": trainer.args.metric_for_best_model,
                **self._asked_for(text.labels.names),
            },
            data=plain(text.counts),
            lengths=plain(tokens.lengths),
            seconds=self.clock.seconds,
            memory=MemorySummary(
                budget_bytes=self.prepared.task.budget_bytes,
                predicted=self.predicted,
                measured=self.probe.peak(trainer.args.device),
                measured_step=None if is_cuda(trainer.args.device) else self.probe.step,
            ),
            plan={} if self.plan is None else self._plan_summary(self.plan),
            device=announcements.device_name(trainer.args.device),
            ranks=self.ranks,
            best_checkpoint=Path(best).name if best else None,
            config_digest=config_digest(self.config.to_toml()),
            versions=versions(),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds") if evaluation else "",
            language=language(),
        )
