"""One rung in a process of its own: `python -m memfit.ladders.run_rung REQUEST.json RESULT.json`.

Measuring takes a few steps. The second learns from the longest rows of the table, so that its peak
is the run's; the steps after the third are timed, on rows drawn at random, the same for every rung.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from memfit.config import RunConfig
from memfit.config.files import plain, read_json, write_json
from memfit.engine.effective_batch import leave_out_refused_half
from memfit.errors import DoesNotFitError, InputError, MemfitError
from memfit.ladders.rungs import DOES_NOT_FIT, FAILED, OK, PLAN, Rung
from memfit.memory.available import CudaReader
from memfit.memory.cards import this_card
from memfit.memory.components import MemoryPeak
from memfit.memory.device import is_cuda, synchronize
from memfit.memory.out_of_memory import is_out_of_memory
from memfit.memory.phases import TRAINING
from memfit.memory.stock_estimate import estimate_memory
from memfit.models.loading import load_weights
from memfit.planner.plans import Plan
from memfit.planner.this_machine import memory_of
from memfit.planner.workload import user_set_of
from memfit.records.evaluation import best_metric, evaluate_predictions
from memfit.run import announcements, stock_flags
from memfit.run.callbacks import MeasureOneStep
from memfit.run.prepare import Prepared, arguments_of, prepare
from memfit.training.limits import CudaCap
from memfit.training.trainer import BudgetTrainer
from memfit.units import Budget, parse_budget


def price_of_stock(prepared: Prepared) -> MemoryPeak | None:
    """The stock Trainer's step on the longest rows of the table; None where it has no price."""
    run, args, labels = prepared.config, prepared.arguments, prepared.text.labels
    rows = args.per_device_train_batch_size
    longest = sorted(prepared.lengths, reverse=True)[:rows]
    options: dict[str, Any] = {
        **run.training,
        "per_device_train_batch_size": rows,
        "max_length": longest[0],
        "num_labels": labels.num_labels,
        "task": labels.task,
        # Rows cut at the same length are padded with nothing.
        "padding": rows > 1 and longest[-1] < longest[0],
    }
    try:
        spec = stock_flags.step_spec(run.model, options)
        card = this_card() if is_cuda(args.device) else None
        return estimate_memory(spec, card).peak
    except MemfitError:
        return None


def price_of_plan(plan: Plan) -> dict[str, Any]:
    """Its training's peak (a few steps are measured, no checkpoint), its strategies, its word."""
    price = plan.price
    predicted = None if price is None else price.phases.get(TRAINING, price.peak)
    return {
        "predicted": predicted,
        "fidelity": str(plan.fidelity),
        "strategies": [one.name for one in plan.strategies],
        "micro_batching": vars_of(plan.micro_batching),
        "targets": targets(plan),
    }


def vars_of(limits: Any) -> dict[str, Any]:
    """What is on the device at once."""
    return {"max_rows": limits.max_rows, "max_tokens": limits.max_tokens}


def targets(plan: Plan) -> list[str]:
    """The components its strategies shrink, in the order they are always named."""
    shrunk = {part for one in plan.strategies for part in one.shrinks}
    return [name for name in ("weights", "gradients", "optimizer", "activations") if name in shrunk]


WARM_STEPS = 3

# Nothing but the training itself: no evaluation, no checkpoint, no log that waits for the device.
_ALONE: Mapping[str, Any] = {
    "eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
    "load_best_model_at_end": False, "eval_on_start": False, "push_to_hub": False,
    "disable_tqdm": True, "resume_from_checkpoint": None,
}  # fmt: skip


class StepTimer(transformers.TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_step_end(self, args: transformers.TrainingArguments, *_: Any, **__: Any) -> None:
        """The device has to be done with it, too."""
        synchronize(args.device)
        self._ends.append(time.perf_counter())

    @property
    def timed(self) -> list[float]:
        """Seconds of the warm steps."""
        warm = self._ends[WARM_STEPS - 1 :]
        return [later - earlier for earlier, later in itertools.pairwise(warm)]


@dataclass
class Job:
    """What a process was asked for, and the data read for it."""

    config: RunConfig
    """The user's."""
    rung: Rung
    scratch: Path

    def __post_init__(self) -> None:
        self.run = self.rung.applied_to(self.config)
        self.prepared = prepare(self.run, self.scratch)
        self.device = self.prepared.arguments.device

    @property
    def effective_rows(self) -> int:
        """Rows one optimizer step learns from."""
        args = self.prepared.arguments
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)

    def trainer(self, over: Mapping[str, Any], rows: Any, plan: Plan | None, callbacks: Any) -> Any:
        """The stock Trainer, or memfit's with its plan."""
        run, prepared = self.run, self.prepared
        alone = replace(run, training={**run.training, **_ALONE, **over})
        arguments = arguments_of(alone, prepared.text.labels, self.scratch)
        transformers.set_seed(arguments.seed)  # the head's first weights are random
        model = load_weights(run.model, prepared.settings, prepared.tokenizer, run.data.max_length)
        named: dict[str, Any] = {
            "train_dataset": rows, "eval_dataset": prepared.tokens.validation,
            "processing_class": prepared.tokenizer, "callbacks": list(callbacks),
        }  # fmt: skip
        if plan is None:
            if self.device.type == "cpu":
                leave_out_refused_half(arguments)
            return transformers.Trainer(model, arguments, **named)
        return BudgetTrainer(
            model, arguments, budget=self.rung.budget, plan=plan,
            user_set=user_set_of(self.config), **named,
        )  # fmt: skip


def measure(job: Job, steps: int, plan_file: Path) -> dict[str, Any]:
    """Predicted and measured peak, and the seconds of the timed steps."""
    prepared = job.prepared
    found: dict[str, Any] = {
        "steps_per_epoch": -(-len(prepared.lengths) // job.effective_rows),
        "fidelity": job.rung.fidelity,
    }
    plan: Plan | None = None
    if job.rung.kind == PLAN:
        try:
            plan = prepared.plan().chosen
        except DoesNotFitError as error:
            return {**found, "status": DOES_NOT_FIT, "why": str(error)}
        plan.write(plan_file)
        found |= price_of_plan(plan)
    else:
        found["predicted"] = price_of_stock(prepared)
    probe, clock = MeasureOneStep(), StepTimer()
    order = rows_in_order(prepared.lengths, job.effective_rows, steps, prepared.arguments.seed)
    over = {"max_steps": WARM_STEPS + steps, "train_sampling_strategy": "sequential"}
    with _capped(job):
        try:
            rows = prepared.tokens.train.select(order)
            trainer = job.trainer(over, rows, plan, [probe, clock])
            found["parameters"], found["learning_parameters"] = announcements.parameters(trainer)
            trainer.train()
            measured = probe.peak(job.device)
        except Exception as error:
            if not is_out_of_memory(error) and not isinstance(error, DoesNotFitError):
                raise
            return {**found, "status": DOES_NOT_FIT, "why": _first_line(error)}
    return {**found, **_verdict(job, measured), "measured": measured, "step_seconds": clock.timed}


def _verdict(job: Job, measured: Any) -> dict[str, Any]:
    """On a CPU nothing stops a stock run at the budget: what it held says whether it fits."""
    limit = _limit_bytes(job)
    if is_cuda(job.device) or limit is None or measured is None:
        return {"status": OK}
    return {"status": OK if measured.device_bytes <= limit else DOES_NOT_FIT}


def _limit_bytes(job: Job) -> int | None:
    """What every rung is held to; None: the whole device."""
    budget = parse_budget(job.config.budget)
    return None if budget == Budget() else memory_of(job.device).limit_bytes(budget)


@contextmanager
def _capped(job: Job) -> Iterator[None]:
    """A card as large as the budget; memfit's own Trainer sees to that itself."""
    limit = _limit_bytes(job)
    if not is_cuda(job.device) or limit is None or job.rung.kind == PLAN:
        yield
        return
    cap = CudaCap(CudaReader(job.device))
    cap.move(limit)
    try:
        yield
    finally:
        cap.release()


def rows_in_order(lengths: Sequence[int], effective: int, steps: int, seed: int) -> list[int]:
    """Rows of every step, one after the other: the second has the longest of the table."""
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    longest = list(itertools.islice(itertools.cycle(by_length[:effective]), effective))
    drawn = list(range(len(lengths)))
    random.Random(seed).shuffle(drawn)
    others = itertools.cycle(drawn)
    first = list(itertools.islice(others, effective))
    rest = list(itertools.islice(others, (WARM_STEPS - 2 + steps) * effective))
    return [*first, *longest, *rest]


def score(job: Job, seed: int, plan_file: Path) -> dict[str, Any]:
    """The metric of the whole training with one seed; the split stays the same."""
    labels, tokens = job.prepared.text.labels, job.prepared.tokens
    metric = best_metric(labels.task)[0]
    plan = Plan.read(plan_file) if job.rung.kind == PLAN else None
    try:
        with _capped(job):
            trainer = job.trainer({"seed": seed, "data_seed": seed}, tokens.train, plan, [])
            started = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - started
            output = trainer.predict(tokens.validation)
    except Exception as error:
        if not is_out_of_memory(error) and not isinstance(error, DoesNotFitError):
            raise
        return {"status": DOES_NOT_FIT, "why": _first_line(error)}
    logits: Any = output.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    evaluation = evaluate_predictions(logits, output.label_ids, labels)
    return {
        "status": OK, "metric": metric, "value": evaluation.metrics[metric],
        "metrics": evaluation.metrics, "train_seconds": seconds,
        "epochs": trainer.args.num_train_epochs,
    }  # fmt: skip


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a request, also where it fails."""
    found: dict[str, Any] = {"seconds": 0.0}
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="memfit-ladder-") as scratch:
            config = RunConfig.from_toml(request["config"])
            job = Job(config, Rung.from_json(request["rung"]), Path(scratch))
            found["device"] = _device(job.device)
            found["rows"] = len(job.prepared.lengths)
            found["budget_bytes"] = _limit_bytes(job)
            plan_file = Path(request["plan_file"])
            if request["seed"] is None:
                found |= measure(job, int(request["steps"]), plan_file)
            else:
                found |= score(job, int(request["seed"]), plan_file)
    except Exception as error:
        wrong = isinstance(error, InputError)
        found |= {"status": FAILED, "why": _first_line(error), "input_is_wrong": wrong}
        if not wrong:
            sys.excepthook(*sys.exc_info())  # into the log
    found["seconds"] = time.perf_counter() - started
    made: dict[str, Any] = plain(found)
    return made


def _device(device: torch.device) -> dict[str, Any]:
    return {
        "type": device.type,
        "name": announcements.device_name(device),
        "total_bytes": memory_of(device).total_bytes,
    }


def _first_line(error: BaseException) -> str:
    """CUDA's message goes on for lines about what else the card holds."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    sentence = ". ".join(line.split(". ")[:2])
    named = isinstance(error, DoesNotFitError | InputError | torch.OutOfMemoryError)
    return sentence if named else f"{type(error).__name__}: {sentence}"


def main() -> None:
    """One request in, one result out."""
    request, result = map(Path, sys.argv[1:3])
    write_json(result, run(read_json(request)))


if __name__ == "__main__":
    main()
