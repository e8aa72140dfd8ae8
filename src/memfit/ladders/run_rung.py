"""One rung in a process of its own: `python -m memfit.ladders.run_rung REQUEST.json RESULT.json`.

Measuring takes a few steps. The second learns from the longest rows of the table, so that its peak
is the run's; the steps after the third are timed, on rows drawn at random, the same for every rung.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from memfit.config import RunConfig
from memfit.config.files import plain, read_json, write_json
from memfit.config.training_fields import training_arguments
from memfit.engine.effective_batch import leave_out_refused_half
from memfit.engine.micro_batches import row_lengths
from memfit.errors import DoesNotFitError, InputError, MemfitError
from memfit.ladders.rungs import DOES_NOT_FIT, FAILED, OK, PLAN, Rung
from memfit.memory.available import CudaReader
from memfit.memory.cards import this_card
from memfit.memory.components import MemoryPeak
from memfit.memory.out_of_memory import is_out_of_memory
from memfit.memory.phases import TRAINING
from memfit.memory.stock_estimate import estimate_memory
from memfit.models.loading import load_settings, load_weights
from memfit.planner.plans import Plan
from memfit.planner.this_machine import plan_here
from memfit.planner.workload import user_set_of, workload_of_run
from memfit.records.evaluation import best_metric, evaluate_predictions
from memfit.run import announcements, stock_flags
from memfit.run.callbacks import MeasureOneStep
from memfit.training.limits import CudaCap
from memfit.training.trainer import BudgetTrainer
from memfit.units import Budget, parse_budget

if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainingArguments

    from memfit.data import LabelSpace, TextData, TokenizedData


def price_of_stock(
    run: RunConfig, args: TrainingArguments, labels: LabelSpace, lengths: Sequence[int]
) -> MemoryPeak | None:
    """The stock Trainer's step on the longest rows of the table; None where it has no price."""
    rows = args.per_device_train_batch_size
    longest = sorted(lengths, reverse=True)[:rows]
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
        card = this_card() if args.device.type == "cuda" else None
        return estimate_memory(spec, card).peak
    except MemfitError:
        return None


def planned(
    run: RunConfig,
    settings: PretrainedConfig,
    args: TrainingArguments,
    text: TextData,
    tokens: TokenizedData,
    budget: str,
) -> Plan:
    """The fastest plan inside the budget on this machine, as `memfit train` makes it."""
    workload = workload_of_run(
        run, copy.deepcopy(settings), args, text.labels, row_lengths(tokens.train),
        eval_rows=len(tokens.validation),
    )  # fmt: skip
    made = plan_here(
        workload, parse_budget(budget), args.device, exact=run.exact, allow=run.allowed
    )
    return made.chosen


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

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The device has to be done with it, too."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
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
        from memfit.data import read_table, tokenize

        self.run = self.rung.applied_to(self.config)
        self.text: TextData = read_table(self.run.data)
        self.settings, self.tokenizer = load_settings(self.run.model, self.text.labels)
        length = self.run.data.max_length
        self.tokens: TokenizedData = tokenize(self.text, self.tokenizer, length)
        self.lengths = row_lengths(self.tokens.train)
        self.arguments = self.training_arguments({})
        self.device = self.arguments.device

    def training_arguments(self, over: Mapping[str, Any]) -> Any:
        """The run's own, with what this process does otherwise."""
        return training_arguments(
            {**self.run.training, **over},
            self.scratch,
            best_metric(self.text.labels.task)[0],
            task=self.text.labels.task,
        )

    @property
    def effective_rows(self) -> int:
        """Rows one optimizer step learns from."""
        args = self.arguments
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)

    def make_plan(self) -> Plan:
        """The fastest plan inside the rung's budget."""
        args, budget = self.arguments, self.rung.budget
        return planned(self.run, self.settings, args, self.text, self.tokens, budget)

    def trainer(self, over: Mapping[str, Any], rows: Any, plan: Plan | None, callbacks: Any) -> Any:
        """The stock Trainer, or memfit's with its plan."""
        arguments = self.training_arguments({**_ALONE, **over})
        transformers.set_seed(arguments.seed)  # the head's first weights are random
        model = load_weights(
            self.run.model, self.settings, self.tokenizer, self.run.data.max_length
        )
        named: dict[str, Any] = {
            "train_dataset": rows, "eval_dataset": self.tokens.validation,
            "processing_class": self.tokenizer, "callbacks": list(callbacks),
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
    found: dict[str, Any] = {
        "steps_per_epoch": -(-len(job.lengths) // job.effective_rows),
        "fidelity": job.rung.fidelity,
    }
    plan: Plan | None = None
    if job.rung.kind == PLAN:
        try:
            plan = job.make_plan()
        except DoesNotFitError as error:
            return {**found, "status": DOES_NOT_FIT, "why": str(error)}
        plan.write(plan_file)
        found |= price_of_plan(plan)
    else:
        found["predicted"] = price_of_stock(job.run, job.arguments, job.text.labels, job.lengths)
    probe, clock = MeasureOneStep(), StepTimer()
    order = rows_in_order(job.lengths, job.effective_rows, steps, job.arguments.seed)
    over = {"max_steps": WARM_STEPS + steps, "train_sampling_strategy": "sequential"}
    with _capped(job):
        try:
            rows = job.tokens.train.select(order)
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
    if job.device.type == "cuda" or limit is None or measured is None:
        return {"status": OK}
    return {"status": OK if measured.device_bytes <= limit else DOES_NOT_FIT}


def _limit_bytes(job: Job) -> int | None:
    from memfit.planner.this_machine import budget_here

    budget = parse_budget(job.config.budget)
    return None if budget == Budget() else budget_here(budget, job.device)


@contextmanager
def _capped(job: Job) -> Iterator[None]:
    """A card as large as the budget; memfit's own Trainer sees to that itself."""
    limit = _limit_bytes(job)
    if job.device.type != "cuda" or limit is None or job.rung.kind == PLAN:
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
    metric = best_metric(job.text.labels.task)[0]
    plan = Plan.read(plan_file) if job.rung.kind == PLAN else None
    try:
        with _capped(job):
            trainer = job.trainer({"seed": seed, "data_seed": seed}, job.tokens.train, plan, [])
            started = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - started
            output = trainer.predict(job.tokens.validation)
    except Exception as error:
        if not is_out_of_memory(error) and not isinstance(error, DoesNotFitError):
            raise
        return {"status": DOES_NOT_FIT, "why": _first_line(error)}
    logits: Any = output.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    evaluation = evaluate_predictions(logits, output.label_ids, job.text.labels)
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
            found["rows"] = len(job.lengths)
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
    total_bytes, _ = announcements.device_memory(device)
    return {
        "type": device.type,
        "name": announcements.device_name(device),
        "total_bytes": total_bytes,
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
