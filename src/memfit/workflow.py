"""One run from the table to the result folder."""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit import announce
from memfit.config import RunConfig
from memfit.errors import LossError, OutputError, RunStoppedError, SaveError, TraceError
from memfit.evaluation import (
    Evaluation,
    best_metric,
    compute_metrics_for,
    evaluate_predictions,
    worst_mistakes,
)
from memfit.files import (
    atomic_writer,
    is_disk_problem,
    plain,
    staged_files,
    why_not_written,
)
from memfit.models import check_model_folder, load_for_training
from memfit.report import terminal
from memfit.results import (
    MemorySummary,
    OutputClaim,
    RunFolder,
    RunSummary,
    claim_output_folder,
    config_digest,
    read_evaluation,
    read_summary,
    versions,
    write_evaluation,
    write_summary,
)
from memfit.settings import check_training, training_arguments
from memfit.stored import last_checkpoint, with_absolute_paths
from memfit.units import Budget, format_both, parse_budget

if TYPE_CHECKING:
    from memfit.data.values import TextData, TokenizedData
    from memfit.runtime.checkpoint import Search
    from memfit.runtime.trainer import BudgetTrainer


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
) -> RunResult:
    """Reads, trains, evaluates and saves; a run that fails early leaves nothing behind."""
    from memfit.curves import followed

    if config.output_dir is None:
        raise OutputError("no output folder given; name one with --output-dir")
    config = with_absolute_paths(config)
    check_model_folder(config.model)
    check_training(config.training)
    say = announce.voice(quiet)
    if resume and (finished := _finished(Path(str(config.output_dir)))):
        say(f"the run in {config.output_dir} has already finished; nothing is left to do")
        return finished
    with (
        claim_output_folder(str(config.output_dir), resume=resume) as claim,
        followed(claim, watch=watch),
    ):
        run = _Run(config, claim, say, quiet=quiet, resume=resume, callbacks=tuple(callbacks))
        return run.finish()


def _finished(folder: Path) -> RunResult | None:
    """The result of a run that came to its end; the summary is written after all else."""
    run = RunFolder(folder)
    evaluated = read_evaluation(folder) if run.summary.is_file() else None
    if evaluated is None:
        return None
    if not run.report.is_file():
        _write_report(folder)
    return RunResult(output_dir=folder, summary=read_summary(folder), evaluation=evaluated[0])


def _write_report(folder: Path) -> None:
    from memfit.report.page import write_report

    write_report(folder)


@dataclass
class _Run:
    """The state of one run while it lasts."""

    config: RunConfig
    claim: OutputClaim
    say: Callable[[Any], None]
    quiet: bool
    resume: bool
    callbacks: tuple[Any, ...]
    clock: _Clock = field(default_factory=_Clock)
    found: Search | None = None
    """The checkpoint a resumed run goes on from."""

    def finish(self) -> RunResult:
        """Everything, in order; what stops it says how to go on."""
        try:
            return self._finish()
        except RunStoppedError as error:
            raise self._with_command(error) from error
        except Exception as error:
            if not is_disk_problem(error):
                raise
            what = f"the run could not be written: {why_not_written(error, self.claim.path)}"
            raise self._with_command(SaveError(what, self._last_good())) from error

    def _with_command(self, error: RunStoppedError) -> RunStoppedError:
        again = f"memfit train --resume --output-dir {shlex.quote(str(self.claim.path))}"
        error.resume_with = again + " --on-nan skip" * isinstance(error, LossError)
        return error

    def _last_good(self) -> Path | None:
        from memfit.runtime.checkpoint import newest_listed

        return newest_listed(self.claim.folder.checkpoints_dir)

    def _finish(self) -> RunResult:
        started = time.perf_counter()
        if self.resume:
            self.found = last_checkpoint(self.claim.folder, self.say)
        with self.clock.measure("data"):
            text = self._read()
        with announce.no_progress_bars():
            trainer, tokens = self._prepare(text)
            self._announce(trainer, text, tokens)
            self.record.begin(self._summary(trainer, text, tokens, None))
            with self.clock.measure("train"):
                self._train(trainer)
            with self.clock.measure("evaluate"):
                evaluation = self._evaluate(trainer, text, tokens)
            with self.clock.measure("save"):
                self._save_model(trainer)
        # A resumed run took what its sessions took together.
        self.clock.seconds["train"] += self.elapsed.earlier_seconds
        total = time.perf_counter() - started + self.elapsed.earlier_seconds
        self.clock.seconds["total"] = total
        summary = self._summary(trainer, text, tokens, evaluation)
        write_summary(self.claim.path, summary)
        _write_report(self.claim.path)
        return RunResult(output_dir=self.claim.path, summary=summary, evaluation=evaluation)

    def _read(self) -> TextData:
        from memfit.data import read_table

        return read_table(self.config.data)

    def _prepare(self, text: TextData) -> tuple[BudgetTrainer, TokenizedData]:
        from transformers import PrinterCallback, ProgressCallback, set_seed

        from memfit.curves import RecordRun
        from memfit.data import tokenize
        from memfit.elapsed import KeepElapsed, elapsed_seconds
        from memfit.interrupt import StopAfterStep
        from memfit.planner import free_strategies
        from memfit.probe import MeasureOneStep
        from memfit.runtime.progress import MemfitProgress
        from memfit.runtime.trainer import BudgetTrainer

        labels, max_length = text.labels, self.config.data.max_length
        arguments = training_arguments(
            self.config.training,
            self.claim.folder.checkpoints_dir,
            best_metric(labels.task)[0],
            head_only=self.config.model.freeze == "encoder",
            task=labels.task,
        )
        set_seed(arguments.seed)  # the head's first weights are random
        with self.clock.measure("load"):
            model, tokenizer = load_for_training(self.config.model, labels, max_length)
            tokens = tokenize(text, tokenizer, max_length)
        self.stop, self.probe = StopAfterStep(self.say), MeasureOneStep()
        last = self.found.good if self.found is not None else None
        self.elapsed = KeepElapsed(elapsed_seconds(last))
        self.record = RecordRun(self.claim.path, earlier_seconds=self.elapsed.earlier_seconds)
        self.budget_bytes = announce.budget_bytes(self.config.budget, arguments.device)
        # On a CPU the bar shows the whole process, the budget counts tensors: no match.
        on_gpu = arguments.device.type == "cuda"
        bar = MemfitProgress(
            budget_bytes=self.budget_bytes if on_gpu else None, console=announce.plain_console()
        )
        strategies, self.left_out = free_strategies(model, arguments)
        make = functools.partial(
            BudgetTrainer,
            model,
            arguments,
            strategies=strategies,
            on_nan=self.config.on_nan,
            train_dataset=tokens.train,
            eval_dataset=tokens.validation,
            processing_class=tokenizer,
            compute_metrics=compute_metrics_for(labels.task, labels.names),
            # The time is kept before a stop ends the run.
            callbacks=[
                *([] if self.quiet else [bar]),
                self.elapsed,
                self.record,
                self.stop,
                self.probe,
                *self.callbacks,
            ],
        )
        with self.clock.measure("plan"):
            trainer = self._fit(make, last)
        if self.quiet:
            trainer.guard.adjustments.say = lambda _: None
        for stock_bar in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(stock_bar)
        return trainer, tokens

    def _fit(self, make: Callable[..., BudgetTrainer], last: Path | None) -> BudgetTrainer:
        """Inside the budget; a resumed run goes on with the micro-batches it began with."""
        from memfit.runtime.batching import MicroBatching
        from memfit.runtime.checkpoint import recorded_micro_batching

        if last is not None and (recorded := recorded_micro_batching(last)):
            begun_with = RunConfig.from_toml(self.claim.folder.config).budget
            if begun_with == self.config.budget:
                trainer = make(budget=self.config.budget, micro_batching=recorded)
                trainer.guard.adjuster.keeps_plan = False  # it was the planner's, not the user's
                return trainer
        try:
            return make(budget=self.config.budget)
        except TraceError as error:
            if parse_budget(self.config.budget) != Budget():
                raise  # a promise that cannot be checked is not made
            self.say(f"note     memory cannot be predicted: {error}")
            return make(budget=self.config.budget, micro_batching=MicroBatching())

    def _announce(self, trainer: BudgetTrainer, text: TextData, tokens: TokenizedData) -> None:
        """What will be done, before it is."""
        self.say(terminal.data_summary(text.counts, tokens.lengths, text.labels.task))
        total, learning = announce.parameters(trainer)
        share = "" if learning == total else f", {learning:,} of them learn"
        self.say(f"model    {self.config.model.model}, {total:,} parameters{share}")
        self.say(f"budget   {announce.budget_sentence(self.config.budget, trainer.args.device)}")
        self.say(f"batch    {announce.batch_sentence(trainer)}")
        for name, reason in self.left_out.items():
            self.say(f"note     no {name}: {reason}")
        with self.clock.measure("plan"):
            self.predicted = announce.predicted_peak(trainer)
        if self.predicted is not None:
            share = terminal.percent(self.predicted.device_bytes / max(self.budget_bytes, 1))
            needs = format_both(self.predicted.device_bytes)
            self.say(f"memory   {needs} at the peak by prediction, {share} of the budget")

    def _train(self, trainer: BudgetTrainer) -> None:
        with atomic_writer(self.claim.folder.config) as file:
            file.write(self.config.to_toml())
        self.claim.keep()
        checkpoint: Any = trainer.args.resume_from_checkpoint
        if self.found is not None:
            checkpoint = self.found if self.found.good is not None else None
            self.say(
                f"resuming from the last checkpoint, {self.found.good.name}"
                if self.found.good is not None
                else "no checkpoint was written yet; starting from the beginning"
            )
        try:
            with self.stop.listening():
                trainer.train(resume_from_checkpoint=checkpoint or None)
        except KeyboardInterrupt:
            self.say(
                f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; go on "
                f"with: memfit train --resume --output-dir {self.claim.path}"
            )
            raise
        finally:
            self.probe.close()

    def _evaluate(
        self, trainer: BudgetTrainer, text: TextData, tokens: TokenizedData
    ) -> Evaluation:
        output = trainer.predict(tokens.validation)
        logits = output.predictions
        # Some heads return their hidden states after the logits.
        logits = logits[0] if isinstance(logits, tuple) else logits
        labels: Any = output.label_ids
        evaluation = evaluate_predictions(logits, labels, text.labels)
        mistakes = worst_mistakes(logits, labels, text.labels, text.validation["text"])
        write_evaluation(self.claim.path, evaluation, mistakes)
        return evaluation

    def _save_model(self, trainer: BudgetTrainer) -> None:
        """The best model as pipeline() wants it: adapters merged, tokenizer beside it."""
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        adapted = hasattr(model, "merge_and_unload")
        if adapted:
            model = model.merge_and_unload()
        tokenizer: Any = trainer.processing_class
        with staged_files(self.claim.path) as folder:
            if adapted or not trainer.export_weights(folder):
                model.save_pretrained(folder)
            for weights in folder.glob("*.safetensors"):
                # Written as a private file; the result should be as readable as the rest of it.
                weights.chmod((folder / "config.json").stat().st_mode)
            tokenizer.save_pretrained(folder)
            trainer.state.save_to_json(str(folder / "trainer_state.json"))

    def _summary(
        self,
        trainer: BudgetTrainer,
        text: TextData,
        tokens: TokenizedData,
        evaluation: Evaluation | None,
    ) -> RunSummary:
        """What is known of the run; before it has been evaluated, what it begins with."""
        total, learning = announce.parameters(trainer)
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
            training={
                "steps": trainer.state.global_step,
                "epochs": trainer.state.epoch,
                "effective_batch": trainer.effective_rows,
                "learning_rate": arguments.learning_rate,
                "optim": str(getattr(arguments.optim, "value", arguments.optim)),
                "seed": arguments.seed,
                "parameters": total,
                "learning_parameters": learning,
            },
            data=plain(text.counts),
            lengths=plain(tokens.lengths),
            seconds=self.clock.seconds,
            memory=MemorySummary(
                budget_bytes=self.budget_bytes,
                predicted=self.predicted,
                measured=self.probe.peak(trainer.args.device),
                measured_step=None if trainer.args.device.type == "cuda" else self.probe.step,
            ),
            device=announce.device_name(trainer.args.device),
            best_checkpoint=Path(best).name if best else None,
            config_digest=config_digest(self.config.to_toml()),
            versions=versions(),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds") if evaluation else "",
        )
