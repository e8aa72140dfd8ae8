"""The summary of a run: what it began with, and how it ended."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config.files import plain
from memfit.i18n import language
from memfit.memory.device import is_cuda, name_of
from memfit.records.results import (
    MemorySummary,
    RankFigures,
    RunSummary,
    config_digest,
    kept_messages,
    versions,
)
from memfit.records.run_warnings import RunWarning, answer_warnings, data_warnings

if TYPE_CHECKING:
    from memfit.memory.components import MemoryPeak
    from memfit.records.evaluation import Evaluation
    from memfit.run.prepare import Prepared
    from memfit.run.train import Training, TrainingRun
    from memfit.training.trainer import BudgetTrainer


def summarize(
    run: TrainingRun,
    prepared: Prepared,
    training: Training,
    evaluation: Evaluation | None = None,
    ranks: tuple[RankFigures, ...] = (),
) -> RunSummary:
    """What is known of the run; without an evaluation, what it begins with."""
    trainer, plan, text = training.trainer, training.chosen.plan, prepared.text
    total, learning = parameters(trainer)
    arguments, device = trainer.user_args, trainer.args.device
    best = trainer.state.best_model_checkpoint
    warnings = data_warnings_of(prepared)
    if evaluation is not None:
        weighted = prepared.class_weights is not None
        warnings = (*answer_warnings(evaluation, weighted=weighted), *warnings)
    return RunSummary(
        model=run.config.model.model,
        task=text.labels.task,
        labels=text.labels.names,
        status="finished" if evaluation else "running",
        metrics=evaluation.metrics if evaluation else {},
        averaging=evaluation.averaging if evaluation else "",
        positive=evaluation.positive if evaluation else "",
        why=evaluation.why if evaluation else "",
        threshold=evaluation.threshold if evaluation else None,
        warnings=warnings,
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
            **_asked_for(run, prepared, training),
        },
        data=plain(text.counts),
        lengths=plain(prepared.tokens.lengths),
        seconds=run.seconds,
        memory=MemorySummary(
            budget_bytes=prepared.task.budget_bytes,
            predicted=predicted_peak(training),
            measured=training.observers.probe.peak(device),
            measured_step=None if is_cuda(device) else training.observers.probe.step,
        ),
        plan={} if plan is None else {**plan.as_json(), "messages": kept_messages(plan.messages())},
        device=name_of(device),
        ranks=ranks,
        best_checkpoint=Path(best).name if best else None,
        config_digest=config_digest(run.config.to_toml()),
        versions=versions(),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds") if evaluation else "",
        language=language(),
    )


def _asked_for(run: TrainingRun, prepared: Prepared, training: Training) -> dict[str, Any]:
    """What was chosen for this training beyond the Trainer's arguments."""
    asked: dict[str, Any] = {}
    if weights := class_weights_sentence(prepared):
        asked["class_weights"] = weights
    if run.config.threshold is not None:
        asked["threshold"] = run.config.threshold
    if (stop_early := training.observers.stop_early) is not None:
        asked["early_stopping"] = run.config.early_stopping
        asked["stopped_early"] = stop_early.stopped_at is not None
    return asked


def class_weights_sentence(prepared: Prepared) -> str:
    """The weight of each class; empty where all count alike."""
    names, weights = prepared.text.labels.names, prepared.class_weights
    if weights is None:
        return ""
    return ", ".join(f"{name} {weight:.4g}" for name, weight in zip(names, weights, strict=True))


def data_warnings_of(prepared: Prepared) -> tuple[RunWarning, ...]:
    """What is doubtful about the rows."""
    return data_warnings(
        prepared.text.counts,
        prepared.tokens.lengths,
        prepared.text.labels.task,
        scoring=prepared.scoring,
        weighted=prepared.class_weights is not None,
    )


def predicted_peak(training: Training) -> MemoryPeak | None:
    """The highest moment of the run as planned; None where memory could not be predicted."""
    plan = training.chosen.plan
    price = None if plan is None else plan.price
    if price is None or not is_cuda(training.trainer.args.device):
        return None if price is None else price.peak
    return dataclasses.replace(price.peak, device_bytes=price.peak.held_bytes)


def parameters(trainer: BudgetTrainer) -> tuple[int, int]:
    """All parameters of the model, and those that are trained."""
    both = [(item.numel(), item.requires_grad) for item in trainer.model.parameters()]
    return sum(count for count, _ in both), sum(count for count, trains in both if trains)
