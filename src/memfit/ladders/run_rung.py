"""Runs one rung: `python -m memfit.ladders.run_rung REQUEST RESULT.json`.

A rung is a configuration. It is read, planned and trained by the functions of an ordinary run, with
the stock Trainer or memfit's, for a few steps. The second step trains on the longest rows of the
table, so that its peak is the run's; the steps after the third are timed, on rows drawn at random,
the same for every rung.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from memfit.config import RunConfig
from memfit.config.files import plain, write_json
from memfit.engine.effective_batch import leave_out_refused_half
from memfit.errors import DoesNotFitError, InputError, MemfitError
from memfit.ladders.rungs import DOES_NOT_FIT, FAILED, OK, PLAN, Rung
from memfit.memory.available import CudaReader
from memfit.memory.cards import this_card
from memfit.memory.components import MemoryPeak
from memfit.memory.device import is_cuda, name_of, synchronize
from memfit.memory.out_of_memory import is_out_of_memory
from memfit.memory.phases import TRAINING
from memfit.memory.stock_estimate import estimate_memory
from memfit.models.loading import load_weights
from memfit.planner.plan import Plan
from memfit.planner.task import memory_of, user_set_of
from memfit.records.evaluation import best_metric, evaluate_predictions
from memfit.run import stock_flags
from memfit.run.callbacks import MeasureOneStep
from memfit.run.prepare import Prepared, arguments_of, prepare
from memfit.training.limits import CudaCap
from memfit.training.trainer import BudgetTrainer
from memfit.units import Budget, parse_budget

WARM_STEPS = 3

# Nothing but the training itself: no evaluation, no checkpoint, no log that waits for the device.
_ALONE: Mapping[str, Any] = {
    "eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
    "load_best_model_at_end": False, "eval_on_start": False, "push_to_hub": False,
    "disable_tqdm": True, "resume_from_checkpoint": None,
}  # fmt: skip


class StepTimer(transformers.TrainerCallback):
    """Notes when each step ended on the device."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: transformers.TrainingArguments, *_: Any, **__: Any) -> None:
        """Called by the Trainer after the update."""
        synchronize(args.device)
        self.ends.append(time.perf_counter())


def trainer_of(
    run: RunConfig,
    prepared: Prepared,
    plan: Plan | None = None,
    rows: Any = None,
    callbacks: Sequence[Any] = (),
    **training: Any,
) -> transformers.Trainer:
    """The stock Trainer of a rung's run, or memfit's with its plan."""
    alone = replace(run, training={**run.training, **_ALONE, **training})
    arguments = arguments_of(alone, prepared.text.labels, Path(prepared.arguments.output_dir or ""))
    transformers.set_seed(arguments.seed)  # the head's first weights are random
    model = load_weights(run.model, prepared.settings, prepared.tokenizer, run.data.max_length)
    named: dict[str, Any] = {
        "train_dataset": prepared.tokens.train if rows is None else rows,
        "eval_dataset": prepared.tokens.validation,
        "processing_class": prepared.tokenizer,
        "callbacks": list(callbacks),
    }
    if plan is None:
        if arguments.device.type == "cpu":
            leave_out_refused_half(arguments)
        return transformers.Trainer(model, arguments, **named)
    return BudgetTrainer(
        model, arguments, budget=run.budget, plan=plan, user_set=user_set_of(run), **named
    )


def measure(
    run: RunConfig, prepared: Prepared, plan: Plan | None, steps: int, limit_bytes: int | None
) -> Iterator[dict[str, Any]]:
    """Yields the prediction, then the measured peak and the seconds of the timed steps."""
    args = prepared.arguments
    effective = args.per_device_train_batch_size * args.gradient_accumulation_steps
    yield {"steps_per_epoch": -(-len(prepared.lengths) // effective)}
    if plan is None:
        yield {"predicted": _stock_peak(run, prepared)}
    else:
        shrunk = {part for one in plan.strategies for part in one.shrinks}
        named = ("weights", "gradients", "optimizer", "activations")
        price = plan.price
        yield {
            "predicted": price and price.phases.get(TRAINING, price.peak),
            "fidelity": str(plan.fidelity),
            "strategies": [one.name for one in plan.strategies],
            "targets": [name for name in named if name in shrunk],
        }
    probe, timer = MeasureOneStep(), StepTimer()
    order = rows_in_order(prepared.lengths, effective, steps, args.seed)
    trainer_of(
        run, prepared, plan, prepared.tokens.train.select(order), [probe, timer],
        max_steps=WARM_STEPS + steps, train_sampling_strategy="sequential",
    ).train()  # fmt: skip
    peak = probe.peak(args.device)
    # On a CPU nothing stops a stock run at the budget: its peak tells whether it fits.
    over = limit_bytes is not None and peak is not None and peak.device_bytes > limit_bytes
    warm = timer.ends[WARM_STEPS - 1 :]
    yield {
        "status": DOES_NOT_FIT if over and not is_cuda(args.device) else OK,
        "measured": peak,
        "step_seconds": [later - earlier for earlier, later in itertools.pairwise(warm)],
    }


def _stock_peak(run: RunConfig, prepared: Prepared) -> MemoryPeak | None:
    """What `memfit estimate` predicts for the longest rows; None where it cannot."""
    args, labels = prepared.arguments, prepared.text.labels
    rows = args.per_device_train_batch_size
    longest = sorted(prepared.lengths, reverse=True)[:rows]
    options: dict[str, Any] = {
        **run.training,
        "per_device_train_batch_size": rows,
        "max_length": longest[0],
        "num_labels": labels.num_labels,
        "task": labels.task,
        "padding": rows > 1 and longest[-1] < longest[0],  # rows of one length are not padded
    }
    try:
        card = this_card() if is_cuda(args.device) else None
        return estimate_memory(stock_flags.step_spec(run.model, options), card).peak
    except MemfitError:
        return None


def rows_in_order(lengths: Sequence[int], effective: int, steps: int, seed: int) -> list[int]:
    """The rows of every step in turn: the second step has the longest of the table."""
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    longest = list(itertools.islice(itertools.cycle(by_length[:effective]), effective))
    drawn = list(range(len(lengths)))
    random.Random(seed).shuffle(drawn)
    others = itertools.cycle(drawn)
    first = list(itertools.islice(others, effective))
    rest = list(itertools.islice(others, (WARM_STEPS - 2 + steps) * effective))
    return [*first, *longest, *rest]


def score(run: RunConfig, prepared: Prepared, plan: Plan | None, seed: int) -> dict[str, Any]:
    """The metric of the whole training with one seed; the split stays the same."""
    labels, tokens = prepared.text.labels, prepared.tokens
    trainer = trainer_of(run, prepared, plan, seed=seed, data_seed=seed)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    output: Any = trainer.predict(tokens.validation)
    logits = output.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    metrics = evaluate_predictions(logits, output.label_ids, labels).metrics
    metric = best_metric(labels.task)[0]
    return {
        "status": OK, "metric": metric, "value": metrics[metric], "metrics": metrics,
        "train_seconds": seconds, "epochs": trainer.args.num_train_epochs,
    }  # fmt: skip


def run_rung(request: Mapping[str, Any], scratch: Path) -> Iterator[dict[str, Any]]:
    """Yields the facts of a rung as they become known, its result last."""
    config, rung = RunConfig.from_toml(request["config"]), Rung.from_json(request["rung"])
    run = rung.applied_to(config)
    prepared = prepare(run, scratch)
    device = prepared.arguments.device
    memory, budget = memory_of(device), parse_budget(config.budget)
    limit_bytes = None if budget == Budget() else memory.limit_bytes(budget)
    yield {
        "device": {
            "type": device.type, "name": name_of(device), "total_bytes": memory.total_bytes
        },
        "rows": len(prepared.lengths),
        "budget_bytes": limit_bytes,
    }  # fmt: skip
    plan, path, seed = None, Path(request["plan_file"]), request["seed"]
    if rung.kind == PLAN:
        plan = Plan.read(path) if seed is not None else prepared.plan().chosen
        plan.write(path)
    elif is_cuda(device) and limit_bytes is not None:
        # For the stock Trainer the card is as small as the budget, until this process ends.
        CudaCap(CudaReader(device)).move(limit_bytes)
    if seed is None:
        yield from measure(run, prepared, plan, int(request["steps"]), limit_bytes)
    else:
        yield score(run, prepared, plan, int(seed))


def result_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a request, also where it fails."""
    found: dict[str, Any] = {}
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="memfit-ladder-") as scratch:
            for facts in run_rung(request, Path(scratch)):
                found |= facts
    except Exception as error:
        fits = not is_out_of_memory(error) and not isinstance(error, DoesNotFitError)
        wrong = isinstance(error, InputError) and fits
        found |= {
            "status": FAILED if fits else DOES_NOT_FIT,
            "why": _first_line(error),
            "input_is_wrong": wrong,
        }
        if fits and not wrong:
            sys.excepthook(*sys.exc_info())  # into the log
    made: dict[str, Any] = plain({**found, "seconds": time.perf_counter() - started})
    return made


def _first_line(error: BaseException) -> str:
    """The first two sentences: CUDA's message goes on about what else the card holds."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    sentence = ". ".join(line.split(". ")[:2])
    named = isinstance(error, DoesNotFitError | InputError | torch.OutOfMemoryError)
    return sentence if named else f"{type(error).__name__}: {sentence}"


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), result_of(json.loads(sys.argv[1])))
