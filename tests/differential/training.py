"""One training, by the stock Trainer or by BudgetTrainer, and all that can be seen of it."""

# ruff: noqa: ARG001, ARG002 - the Trainer decides what callbacks and losses are given.

from __future__ import annotations

import contextlib
import json
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from transformers.hyperparameter_search import OptunaBackend
from transformers.trainer_utils import BestRun, HPSearchBackend

from differential.cases import OPTIMIZERS, RATES, Case
from differential.data import Stream, collator_of, rows_of
from differential.explained import OUR_LOG_ENTRIES
from differential.models import model_of
from memfit import BudgetTrainer
from memfit import strategies as memfit_strategies
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.strategies import Fidelity, Strategy
from memfit.training.guard.step_guard import Guard

CLASS_WEIGHTS = (0.5, 1.0, 3.0)
_CHECKPOINT = "checkpoint-*"
_FREEZING = {"freezing", "frozen_features"}


@dataclass
class Seen:
    """What a user can see of a training."""

    losses: list[float] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    learning: frozenset[str] = frozenset()
    """Names of the parameters that learn."""
    events: list[tuple[str, int]] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    predicted: Any = None
    """Shapes and values that `predict` returns."""
    metrics: dict[str, Any] = field(default_factory=dict)
    returned: tuple[int, float, frozenset[str]] | None = None
    """What `train` returns: steps, mean loss, names of metrics."""
    apart: bool = False
    """Whether the model that was given is another than the one that was trained."""
    no_json: tuple[str, ...] = ()
    """States of checkpoints that only Python reads as JSON."""
    files: frozenset[str] = frozenset()
    state: dict[str, Any] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)
    """What NEFTune adds in each call, as a share of what was asked for; 1 on average."""
    fidelity: Fidelity = Fidelity.EXACT
    strategies: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    """Strategies that said they have no use here."""
    sink: bool = False


class Watch(TrainerCallback):
    """Notes what callbacks are told."""

    def __init__(self, case: Case, seen: Seen) -> None:
        self.case, self.seen = case, seen
        self._hook: Any = None
        self.width: int | None = None
        """Tokens of a row of the whole batch, by which the noise is to be scaled."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if self.case.neftune is not None:
            embeddings = model.get_input_embeddings()
            self._hook = embeddings.register_forward_hook(self._note_noise)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _note_noise(self, module: Any, given: Any, output: Tensor) -> None:
        if module.training and self.width is not None:
            noise = output - F.embedding(given[0], module.weight)
            largest = self.case.neftune / math.sqrt(self.width * output.shape[-1])
            self.seen.noise.append(float(noise.abs().mean()) / (largest / 2))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.events.append(("step begins", state.global_step))

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if self.case.callback == "gradients":
            found = [p.grad for p in model.parameters() if p.grad is not None]
            self.seen.gradients.append(sum(float(g.float().pow(2).sum()) for g in found) ** 0.5)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.events.append(("step ends", state.global_step))
        if self.case.callback == "stop" and state.global_step == 2:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.events.append(("epoch ends", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.events.append(("evaluated", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.events.append(("saved", state.global_step))


class CountingSgd(torch.optim.SGD):
    """Its rate falls with the steps it counts itself, once for each group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["kept_lr"] = group["lr"]
            group["lr"] = group["lr"] / group["count"]
        try:
            return super().step(closure)
        finally:
            for group in self.param_groups:
                group["lr"] = group.pop("kept_lr")


class Failing(TorchDispatchMode):
    """Raises at chosen operators what an allocator raises."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.at = set(at)
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


# ---- losses people write ----


def _per_row(case: Case, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row or token, ignored ones zero."""
    if case.task == "multi":
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    if case.task == "regression":
        return F.mse_loss(logits.squeeze(-1), labels, reduction="none")
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), reduction="none")


def _logits(outputs: Any) -> Tensor:
    found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.logits
    return found


def loss_function(case: Case) -> Any:
    """`compute_loss_func` of the case, where it has one."""

    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = _per_row(case, _logits(outputs), labels).sum()
        return total / num_items_in_batch

    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        losses = _per_row(case, _logits(outputs), labels)
        counted = labels.ne(-100).sum() if not labels.is_floating_point() else losses.numel()
        return losses.sum() / counted

    return {"func": summed, "mean_func": mean}.get(case.loss)


def _own_loss(case: Case, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """What a user's `compute_loss` does, with the batch as its collator made it."""
    labels = inputs["labels"]
    assert len(labels) == inputs["input_ids"].shape[0]
    if case.collator != "maskless":
        assert inputs["attention_mask"].shape == inputs["input_ids"].shape
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    if case.loss == "body":
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        body = getattr(inner, inner.base_model_prefix)
        hidden = body(**rest).last_hidden_state
        width = 1 if case.task == "regression" else len(CLASS_WEIGHTS)
        logits = hidden[:, 0, :width]
        outputs: Any = {"logits": logits}
    else:
        outputs = model(**rest)
        logits = _logits(outputs)
    if case.loss in ("weighted", "class_weights"):
        weight = torch.tensor(CLASS_WEIGHTS)
        if case.task == "multi":
            loss = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight)
        else:
            loss = F.cross_entropy(logits, labels, weight=weight)
    else:
        loss = _per_row(case, logits, labels).sum() / inputs["input_ids"].shape[0]
    shown = dict(outputs) if isinstance(outputs, dict) else {"logits": logits}
    return loss, {"loss": loss, **shown}


def trainer_class(case: Case, base: type[transformers.Trainer]) -> type[transformers.Trainer]:
    """The base, or a subclass as a user with his own loss writes it."""
    budgeted = issubclass(base, BudgetTrainer)
    if case.loss not in ("rows", "body", "weighted") and (budgeted or case.loss != "class_weights"):
        return base

    class OwnLoss(base):  # type: ignore[valid-type,misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            loss, outputs = _own_loss(case, model, inputs)
            return (loss, outputs) if return_outputs else loss

    if budgeted and case.loss == "weighted":

        class Weighted(OwnLoss):
            def loss_weight(self, inputs: Any) -> float:
                return float(torch.tensor(CLASS_WEIGHTS)[inputs["labels"]].sum())

        return Weighted
    return OwnLoss


# ---- making and running it ----


class Training:
    """A case with one of the two Trainers, in a folder of its own."""

    def __init__(
        self, case: Case, base: type[transformers.Trainer], folder: Path, reference: Seen | None
    ) -> None:
        self.case, self.base, self.folder = case, base, folder
        self.budgeted = issubclass(base, BudgetTrainer)
        self.given = reference
        """What our side did, for a reference that must be told which weights learn."""
        self.seen = Seen()
        self.kind = trainer_class(case, base)
        self.settled = False
        self.strategies = [_strategy(text) for text in case.strategies] if self.budgeted else []

    def run(self) -> Seen:
        """Train as the case says, and look."""
        with _quiet(), self._failing():
            trainer = self._trained()
            self._look(trainer)
        return self.seen

    def _trained(self) -> transformers.Trainer:
        case = self.case
        model = None if case.model_init else self.model()
        trainer = self.trainer(model)
        if case.trial:
            self._search(trainer)
            return trainer
        self._note(trainer.train())
        if case.resume:
            first = min(self.folder.glob(_CHECKPOINT), key=lambda path: int(path.name[11:]))
            self._forget()
            trainer = self.trainer(None if case.model_init else self.model())
            self._note(trainer.train(resume_from_checkpoint=str(first)))
        elif case.again == "train":
            self._forget()
            self._note(trainer.train())
        elif case.again == "trainer":
            self._forget()
            trainer = self.trainer(model)
            self._note(trainer.train())
        self.seen.apart = model is not None and not case.resume and trainer.model is not model
        return trainer

    def _note(self, output: Any) -> None:
        metrics = frozenset(output.metrics)
        self.seen.returned = (output.global_step, output.training_loss, metrics)

    def _forget(self) -> None:
        """Only the last trainer's run is compared."""
        self.seen.events.clear()
        self.seen.gradients.clear()

    def _search(self, trainer: transformers.Trainer) -> None:
        """A search of one trial; optuna itself has no part in what a trial changes."""

        def run(_: Any, trainer: Any, n_trials: int, direction: str, **__: Any) -> BestRun:
            trial = types.SimpleNamespace(number=0, params={})
            trainer.objective = None
            trainer.train(resume_from_checkpoint=None, trial=trial)
            return BestRun("0", 0.0, {})

        batch = self.case.trial * (1 if self.budgeted else self.case.accumulation)
        with (
            mock.patch.object(OptunaBackend, "run", run),
            mock.patch.object(OptunaBackend, "is_available", staticmethod(lambda: True)),
            mock.patch.object(transformers.integrations, "hp_params", lambda trial: trial.params),
        ):
            trainer.hyperparameter_search(
                hp_space=lambda _: {"per_device_train_batch_size": batch},
                backend=HPSearchBackend.OPTUNA,
                n_trials=1,
            )

    def model(self) -> nn.Module:
        case = self.case
        model: Any = model_of(case.task, case.family, case.head, wide=case.wide)
        if case.outputs and hasattr(model, "config"):
            model.set_attn_implementation("eager")
            setattr(model.config, f"output_{case.outputs}", True)
        if self.given is not None and _FREEZING & set(self.given.strategies):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in self.given.learning)
        return model

    def arguments(self) -> transformers.TrainingArguments:
        case, own = self.case, self.budgeted
        evaluation: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
        if case.best:
            evaluation |= {"eval_steps": case.save, "load_best_model_at_end": True,
                           "metric_for_best_model": "spread"}  # fmt: skip
        length = {"max_steps": case.steps} if case.steps else {"num_train_epochs": 1.5}
        optim = case.optim if case.optim in OPTIMIZERS else "sgd"
        if self.given is not None and "small_state_optimizer" in self.given.strategies:
            optim = "adafactor"
        fields: dict[str, Any] = dict(
            per_device_train_batch_size=case.batch if own else case.effective,
            gradient_accumulation_steps=case.accumulation if own else 1,
            per_device_eval_batch_size=4,
            learning_rate=RATES.get(case.optim, 1e-3),
            optim=optim,
            lr_scheduler_type=case.schedule,
            warmup_steps=case.warmup,
            max_grad_norm=case.clip,
            weight_decay=case.decay,
            neftune_noise_alpha=case.neftune,
            label_smoothing_factor=0.1 if case.loss == "smoothing" else 0.0,
            train_sampling_strategy=case.sampling,
            logging_steps=1,
            save_strategy="steps" if case.save else "no",
            save_steps=case.save or 500,
            save_total_limit=case.limit,
            save_only_model=case.only_model,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **(evaluation if case.evaluate else {}),
            **length,
        )
        if case.argument is not None:
            fields |= dict([case.argument])
        return transformers.TrainingArguments(str(self.folder), **fields)

    def trainer(self, model: nn.Module | None) -> transformers.Trainer:
        """Strategies that have no use for the first trainer are left out; all else must work."""
        while True:
            try:
                made = self._made(model)
                self.settled = True
                return made
            except ConfigError as error:
                left_out = [one for one in self.strategies if str(error).startswith(one.name)]
                if not left_out or self.settled:
                    raise
                self.strategies.remove(left_out[0])
                self.seen.dropped += (str(left_out[0]),)

    def _made(self, model: nn.Module | None) -> transformers.Trainer:
        case = self.case
        pad = 1 if case.family in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
        rows: Any = rows_of(case.task, case.rows, case.seed, ignored=case.ignored)
        if case.data == "iterable":
            rows = Stream(rows * 4)
        more: dict[str, Any] = {}
        if case.loss in ("func", "mean_func"):
            more["compute_loss_func"] = loss_function(case)
        if case.optim == "given" and model is not None:
            learning = [p for p in model.parameters() if p.requires_grad]
            more["optimizers"] = (torch.optim.SGD(learning, lr=RATES["given"], momentum=0.9), None)
        if case.optim == "class":
            more["optimizer_cls_and_kwargs"] = (torch.optim.NAdam, {"lr": 1e-3})
        if case.optim == "counting":
            more["optimizer_cls_and_kwargs"] = (CountingSgd, {"lr": RATES["counting"]})
        if self.budgeted:
            more |= self._ours()
        trainer = self.kind(
            model,
            self.arguments(),
            train_dataset=rows,
            eval_dataset=rows_of(case.task, 7, case.seed + 1) if case.evaluate else None,
            data_collator=collator_of(case.collator, pad),
            compute_metrics=_spread if case.evaluate else None,
            model_init=self.model if case.model_init else None,
            callbacks=[watch := Watch(case, self.seen)],
            **more,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if case.neftune is not None:
            _tell_width(trainer, watch)
        return trainer

    def _ours(self) -> dict[str, Any]:
        case = self.case
        more: dict[str, Any] = {}
        if case.loss == "class_weights":
            more["class_weights"] = CLASS_WEIGHTS
        if case.micro_rows or case.micro_tokens:
            more["micro_batching"] = MicroBatching(case.micro_rows, case.micro_tokens)
        if case.budget is not None:
            more["budget"] = case.budget
        if self.strategies:
            more["strategies"] = list(self.strategies)
        return more

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Operators of forward and backward fail; what comes before them runs on the host."""
        if not self.budgeted or not self.case.failing:
            yield
            return
        failing, attempt = Failing(self.case.failing), Guard.attempt

        def watched(*args: Any, **kwargs: Any) -> Any:
            with failing:
                return attempt(*args, **kwargs)

        with mock.patch.object(Guard, "attempt", watched), _without_torchscript():
            yield

    # ---- looking ----

    def _look(self, trainer: Any) -> None:
        seen, case = self.seen, self.case
        history = trainer.state.log_history
        seen.logs = [dict(entry) for entry in history if not OUR_LOG_ENTRIES & entry.keys()]
        seen.losses = [entry["loss"] for entry in seen.logs if "loss" in entry]
        model = trainer.accelerator.unwrap_model(trainer.model)
        seen.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        seen.learning = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
        if self.budgeted:
            self._look_at_ours(trainer)
        seen.state = _state(trainer)
        if case.evaluate:
            found = trainer.predict(rows_of(case.task, 7, case.seed + 2))
            seen.predicted = (found.predictions, found.label_ids)
            seen.metrics = found.metrics
        if case.save:
            trainer.save_model()
            states = sorted(self.folder.rglob("trainer_state.json"))
            seen.no_json = tuple(path.parent.name for path in states if not _is_json(path))
            seen.files = frozenset(
                str(path.relative_to(self.folder)) for path in self.folder.rglob("*")
            )

    def _look_at_ours(self, trainer: Any) -> None:
        plan = trainer.plan
        used: Any = plan.strategies if plan is not None and not self.strategies else self.strategies
        self.seen.strategies = tuple(one.name for one in used)
        self.seen.fidelity = max((one.fidelity for one in used), default=Fidelity.EXACT)
        self.seen.sink = trainer.setup.sink is not None


def _tell_width(trainer: Any, watch: Watch) -> None:
    """Let the watch know each batch's width: the two Trainers may have their rows in another order,
    and `Truncation` cuts them."""
    training_step = trainer.training_step

    def noting(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        watch.width = inputs["input_ids"].shape[1]
        try:
            return training_step(model, inputs, *rest, **more)
        finally:
            watch.width = None

    trainer.training_step = noting


def _is_json(path: Path) -> bool:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except ValueError:
        return False
    return True


def _strategy(text: str) -> Strategy:
    made: Strategy = eval(text, vars(memfit_strategies))
    return made


def _spread(found: Any) -> dict[str, float]:
    """A metric of what the model says, whatever it says."""
    first = found.predictions
    while isinstance(first, tuple | list):
        first = first[0]
    return {"spread": float(np.abs(np.asarray(first, dtype=np.float64)).mean())}


def _state(trainer: Any) -> dict[str, Any]:
    names = ("global_step", "max_steps", "num_train_epochs", "epoch", "best_metric",
             "best_global_step", "total_flos", "train_batch_size", "eval_steps",
             "logging_steps", "save_steps")  # fmt: skip
    return {name: getattr(trainer.state, name) for name in names}


@contextlib.contextmanager
def _without_torchscript() -> Iterator[None]:
    """DeBERTa's scripted functions as the Python functions they were.

    A Python error that passes TorchScript becomes a RuntimeError without a message, which an
    allocator's does not; and how many operators it runs depends on what it has optimized before.
    """
    from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta

    scripted = {
        name: value._torchdynamo_inline
        for name, value in vars(deberta).items()
        if isinstance(value, torch.jit.ScriptFunction)
    }
    with mock.patch.multiple(deberta, **scripted):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import logging
    import warnings

    ours, before = logging.getLogger("memfit"), transformers.logging.get_verbosity()
    level = ours.level
    ours.setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity(logging.CRITICAL)
    had_bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if had_bars:
            transformers.logging.enable_progress_bar()
        ours.setLevel(level)
        transformers.logging.set_verbosity(before)
