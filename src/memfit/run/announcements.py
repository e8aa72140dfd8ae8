"""What a run says about itself: before it starts, on its page while it trains, and how it ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import MemfitError
from memfit.i18n import N_, shown, t
from memfit.memory.device import kind_of
from memfit.printing import encodable, printable
from memfit.records.results import OutputClaim
from memfit.records.run_log import RunLog
from memfit.report.formatting import averaging_sentence, named, together
from memfit.run.summary import (
    class_weights_sentence,
    data_warnings_of,
    parameters,
    predicted_peak,
)
from memfit.units import format_both, percent
from memfit.waiting import make_way

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.planner.plan import Plan
    from memfit.planner.task import Task
    from memfit.records.scoring import Scoring
    from memfit.run.prepare import Prepared
    from memfit.run.train import Training, TrainingRun
    from memfit.training.trainer import BudgetTrainer


def voice(quiet: bool) -> Callable[[Any], None]:
    """Prints text and tables to stderr, or nothing at all."""
    if quiet:
        return lambda _: None
    from memfit.report import terminal

    lines, tables = plain_console(), terminal.console(stderr=True)

    def say(what: Any) -> None:
        make_way()
        if isinstance(what, str):
            lines.print(printable(what))
        else:
            tables.print(what)

    return say


def plain_console() -> Console:
    """Stderr for single lines: a log file gets them whole, however long."""
    from rich.console import Console

    is_terminal = sys.stderr.isatty()
    encodable(sys.stderr)
    return Console(
        stderr=True,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not is_terminal,
        # FORCE_COLOR asks for colours in a log, not for a bar that moves.
        force_interactive=None if is_terminal else False,
    )


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Holds back transformers' bars over files; ours over the training is the one to watch."""
    from transformers.utils import logging as logging_module

    logging: Any = logging_module
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


def announce(run: TrainingRun, prepared: Prepared, training: Training) -> None:
    """Says what will be done, before it is."""
    from memfit.report import terminal

    trainer, chosen, task = training.trainer, training.chosen, prepared.task
    text, line = prepared.text, terminal.fact_line
    run.say(terminal.data_summary(text.counts, prepared.tokens.lengths, text.labels.task))
    if warnings := data_warnings_of(prepared):
        run.say(terminal.warnings_list(warnings))
    run.say(line("model", model_sentence(run.config.model.model, trainer)))
    run.say(line("budget", budget_sentence(task)))
    if chosen.plan is not None:
        sentence = plan_sentence(chosen.plan)
        if chosen.cached:
            sentence = t("{plan}; kept from an earlier run", plan=sentence)
        run.say(line("plan", sentence))
    run.say(line("batch", batch_sentence(trainer)))
    if weights := class_weights_sentence(prepared):
        run.say(line("weights", weights))
    run.say(line("metric", metric_sentence(prepared.scoring, trainer)))
    if (peak := predicted_peak(training)) is not None:
        sentence = t(
            "{needs} at the peak by prediction, {share} of the budget",
            needs=format_both(peak.device_bytes),
            share=percent(peak.device_bytes / max(task.budget_bytes, 1)),
        )
        name = "memory" if kind_of(trainer.args.device) == "cpu" else "gpu_memory"
        run.say(line(name, sentence))


def model_sentence(model: str, trainer: BudgetTrainer) -> str:
    """Its name, its parameters, and how many of them learn where not all do."""
    total, learning = parameters(trainer)
    kind = (
        N_("{model}, {total} parameters")
        if learning == total
        else N_("{model}, {total} parameters, {learning} of them trainable")
    )
    return t(kind, model=model, total=f"{total:,}", learning=f"{learning:,}")


def budget_sentence(task: Task) -> str:
    """Both units, since a '4 GB' card has 4 GiB; and what is done about one that is too large."""
    asked, sentence = task.budget, format_both(task.budget_bytes)
    if asked.bytes is not None and asked.bytes > task.budget_bytes:
        return t(
            "{bytes}: all that is free, less than the {asked} asked for",
            bytes=sentence,
            asked=format_both(asked.bytes),
        )
    return t("{bytes}, {asked}", bytes=sentence, asked=asked) if asked.bytes is None else sentence


def batch_sentence(trainer: BudgetTrainer) -> str:
    """The rows an optimizer step learns from, and how many are on the device at once."""
    micro = trainer.micro_batching
    kind = {
        (True, True): N_(
            "{rows} rows a step, at most {most_rows} rows and {most_tokens} tokens on the "
            "device at once"
        ),
        (True, False): N_("{rows} rows a step, at most {most_rows} rows on the device at once"),
        (False, True): N_("{rows} rows a step, at most {most_tokens} tokens on the device at once"),
        (False, False): N_("{rows} rows a step, all on the device at once"),
    }[micro.max_rows is not None, micro.max_tokens is not None]
    said = t(
        kind,
        rows=f"{trainer.effective_rows:,}",
        most_rows=f"{micro.max_rows or 0:,}",
        most_tokens=f"{micro.max_tokens or 0:,}",
    )
    if trainer.setup.packing is not None:
        said = t("{batch}, packed without padding", batch=said)
    ranks = trainer.args.world_size
    if ranks == 1:
        return said
    each = f"{trainer.effective_rows // ranks:,}"
    return t("{batch}; {rows} rows on each of {ranks} ranks", batch=said, rows=each, ranks=ranks)


def metric_sentence(scoring: Scoring, trainer: BudgetTrainer) -> str:
    """What picks the best model, and which class or mean F1 is of."""
    said = averaging_sentence(scoring.averaging, scoring.positive, scoring.why)
    chosen_by = trainer.args.metric_for_best_model
    if not chosen_by or not trainer.args.load_best_model_at_end:
        return said
    name = named("metric", chosen_by.removeprefix("eval_"))
    return together([t("{metric} picks the best model.", metric=name), said])


def plan_sentence(plan: Plan) -> str:
    """What the plan does to the result, and the strategies it uses."""
    from memfit.strategies import called

    names = [shown(called(one)) for one in plan.strategies]
    fidelity = named("fidelity", str(plan.fidelity))
    if not names:
        return fidelity
    return t("{fidelity}: {strategies}", fidelity=fidelity, strategies=t(", ").join(names))


Watcher = Callable[[Path], contextlib.AbstractContextManager[None]]
"""Serves the page of the run in a folder while a block lasts."""


@contextlib.contextmanager
def followed(claim: OutputClaim, watch: Watcher | None = None) -> Iterator[None]:
    """A run that does not finish leaves word of how it ended, and its page.

    `watch` serves the page while the run trains.
    """
    from memfit.report.page import write_report

    with contextlib.nullcontext() if watch is None else watch(claim.path):
        try:
            yield
        except BaseException as error:
            if claim.kept:
                is_stopped = isinstance(error, KeyboardInterrupt)
                why = "" if is_stopped else str(error).strip()
                if not isinstance(error, KeyboardInterrupt | MemfitError):
                    why = ": ".join([type(error).__name__, *why.splitlines()[:1]])
                RunLog(claim.path).ended("stopped" if is_stopped else "failed", why)
                with contextlib.suppress(Exception):  # the error that is being raised says more
                    write_report(claim.path)
            raise
