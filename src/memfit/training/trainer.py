"""The Trainer of transformers on effective batches, inside a memory budget."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import recursively_apply
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

from memfit._compat import without_num_items
from memfit.config.training_arguments import TrainingArguments
from memfit.engine import micro_batches
from memfit.engine.effective_batch import (
    accumulation_steps,
    effective_arguments,
    layerwise_accumulation,
    leave_out_refused_half,
    warn_of_conflicts,
)
from memfit.engine.executors import StepExecutor
from memfit.engine.half_on_cpu import TYPES, half_on_cpu
from memfit.engine.loss import (
    BatchNoise,
    ClassWeightedLoss,
    counted_items,
    counted_labels,
    only_first_label,
    parts_of_loss,
    share_alike,
    shifts_labels,
)
from memfit.engine.micro_batches import (
    Batch,
    MicroBatch,
    MicroBatching,
    Trim,
    logits_and_labels,
    trimming_for,
)
from memfit.engine.packed_batch import IGNORED_LABEL
from memfit.engine.ranks import Ranks, meeting
from memfit.engine.step_state import preserved_rng
from memfit.errors import ConfigError, ModelError
from memfit.i18n import t
from memfit.memory.allocator import use_expandable_segments
from memfit.memory.device import is_cuda, kind_of, lower_watermarks
from memfit.memory.out_of_memory import HeapTrimmer
from memfit.models.layer_stack import shows_tokens, unwrap
from memfit.strategies import Setup, Strategy
from memfit.strategies.fully_sharded import gathered, is_divided, optimizer_parts
from memfit.training.checkpoints import (
    CheckpointSearch,
    record_micro_batching,
    rows_of_each_rank,
    step_of,
    warn_of_other_cut,
)
from memfit.training.export import MasterWeights
from memfit.training.guard.adjusting import StepSettings
from memfit.training.guard.step_guard import Guard
from memfit.training.guard.updates import (
    allocate_state,
    careful,
    steps_in_backward,
    unwrapped,
)
from memfit.training.health import Health, StallWatch
from memfit.training.loaders import (
    ShareOfRank,
    in_order,
    kept_on_cpu,
    prepared_alone,
    quick,
    repeatable,
)
from memfit.training.model_changes import (
    ModelChanges,
    TrainerChoices,
    by_name,
    give_back,
    own_optimizer,
)
from memfit.training.progress import MemfitProgress, register_memory_logging
from memfit.training.saving import CheckpointSaver, arguments_as_given, reading, same_parameters
from memfit.units import Budget, parse_budget
from memfit.waiting import doing

if TYPE_CHECKING:
    from memfit.planner.plan import Plan

_WANTED = (
    "should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log",
)  # fmt: skip
"""What a TrainerControl says is to be done after a step."""

_STOCK_BARS = ("ProgressCallback", "PrinterCallback", "NotebookProgressCallback")


class BudgetTrainer(transformers.Trainer):
    """`transformers.Trainer` whose batches are effective batches, run as micro-batches.

    Takes the Trainer's own arguments. One optimizer step learns from per-device batch x
    accumulation rows, so 1 x 32 and 32 are the same training; what is on the device at once is
    `micro_batching`, or what `budget` allows. `class_weights` are exact however batches are cut.
    `strategies` are the memory techniques to use (memfit.strategies). With a budget and none given
    the fastest plan that fits is made and run, what the arguments set being kept; `plan` is one
    made before. `on_nan` says what a loss that is not finite does: `stop` the run, or `skip` the
    update. `user_set` names the arguments that were chosen, if that is more than those which
    differ from the defaults. `saves_model` reserves disk space for the whole model, which the
    caller saves in the end; `say_adjustment` prints what the guard changes (default: the log).
    """

    model: PreTrainedModel
    model_init: Any
    hp_search_backend: Any
    guard: Guard
    executor: StepExecutor
    _keeps_predictions = False
    steps_in_backward = False
    """Whether the optimizer updates weights inside backward, known from the first step on."""
    _whole_weights: dict[str, Any] | None = None
    """The whole weights of a sharded model, while it is saved."""

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *positional: Any,
        budget: str | int | Budget | None = None,
        micro_batching: MicroBatching | None = None,
        class_weights: Sequence[float] | torch.Tensor | None = None,
        strategies: Sequence[Strategy] | None = None,
        plan: Plan | None = None,
        user_set: frozenset[str] | None = None,
        on_nan: str = "stop",
        saves_model: bool = False,
        say_adjustment: Callable[[str], None] | None = None,
        **named: Any,
    ) -> None:
        self._say_adjustment = say_adjustment
        self.user_args = args if args is not None else TrainingArguments("tmp_trainer")
        self._args_seen = _fields(self.user_args)
        if user_set is None:
            warn_of_conflicts(self.user_args)
        self._folded = accumulation_steps(self.user_args)
        named = {**by_name(positional), **named}
        if "tokenizer" in named:
            named["processing_class"] = named.pop("tokenizer")
            warnings.warn(
                t("tokenizer is now called processing_class"), FutureWarning, stacklevel=2
            )
        if model is not None:
            give_back(model)  # an earlier trainer's changes are none of this one's
        effective = effective_arguments(self.user_args)
        if kind_of(effective.device) == "cpu":
            leave_out_refused_half(effective)
        self.ranks = Ranks.here() if effective.world_size > 1 else Ranks()
        """The processes that train this model together."""
        if model is not None:
            # Before strategies split weights in two: DDP would give all ranks one half only.
            self.ranks.same([*model.parameters(), *model.buffers()])
        self._predictions: dict[int, tuple[Any, Any]] = {}
        """Predictions of the last evaluation and of the best one, by step."""
        if budget is not None and not isinstance(budget, Budget):
            budget = parse_budget(budget)
        self.budget = budget
        choices = TrainerChoices(
            strategies,
            micro_batching,
            own_optimizer(self, named),
            own_loss=named.get("compute_loss_func") is not None,
            weighted_loss=class_weights is not None,
            on_nan=on_nan,
        )
        self.changes = ModelChanges(self, model, effective, choices, plan, named, user_set)
        self.checkpoints = CheckpointSaver(
            self, make_room=lambda: self.guard.make_room(), saves_model=saves_model
        )
        self.masters = MasterWeights(self, self._load_optimizer_and_scheduler)
        self.health = Health(self, on_nan)
        self.heap = HeapTrimmer()
        self.noise = BatchNoise()
        self._preparing = contextlib.ExitStack()
        """Shows what is being done until the first step begins."""
        if self.budget is not None and is_cuda(effective.device):
            use_expandable_segments()
        if kind_of(effective.device) == "mps":
            lower_watermarks()
        try:
            if model is None and named.get("model_init") is not None:
                self.model_init = named["model_init"]
                self.changes.make_model()
            self.changes.apply()
            given = None if model is None else self.setup.model
            super().__init__(given, effective, **named)
            self._prepare(class_weights)
            self.equip(self.model)
            for callback in (StallWatch(), self.noise):
                self.add_callback(callback)
            # First of all callbacks: what it finds out is what the others announce.
            self.callback_handler.callbacks.insert(0, _BeforeTraining(self))
            register_memory_logging(self, self.budget)
        except BaseException:
            self.changes.cancel()
            raise

    def _prepare(self, class_weights: Sequence[float] | torch.Tensor | None) -> None:
        if kind_of(self.args.device) == "cpu":
            check_half_weights(self.model)
        # The classification heads accept num_items_in_batch and ignore it (transformers#47688).
        self._stock_counts_items = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = False
        if (tolerant := without_num_items(self.compute_loss)) != self.compute_loss:
            self.compute_loss = tolerant  # type: ignore[method-assign]
        if class_weights is not None:
            if self.compute_loss_func is not None:
                raise ConfigError("give class_weights or compute_loss_func, not both")
            smoothing = self.args.label_smoothing_factor
            self.compute_loss_func = ClassWeightedLoss(class_weights, smoothing)
        self.data_collator = quick(self.data_collator)

    def equip(self, model: nn.Module) -> None:
        """Makes executor and guard for the model as it is now."""
        self.model = model  # type: ignore[assignment]
        self._shifts_labels: bool | None = None
        self._said_whole = False
        self._learning_flops: int | None = None
        self.executor = self.create_step_executor(self.changes.asked.micro_batches(self.plan))
        line = None if self.plan is None else self.plan.line
        self.guard = Guard(self, self.changes.used, line=line, say=self._say_adjustment)

    # ---- what memfit adds ----

    @property
    def setup(self) -> Setup:
        """What the strategies have changed."""
        return self.changes.setup

    @property
    def plan(self) -> Plan | None:
        """What was planned for the budget; None where the user chose everything."""
        return self.changes.plan

    @property
    def micro_batching(self) -> MicroBatching:
        """What is on the device at once; may be changed between steps."""
        return self.executor.micro_batching

    @micro_batching.setter
    def micro_batching(self, value: MicroBatching) -> None:
        self.executor = dataclasses.replace(self.executor, micro_batching=value)
        self.guard.replan()

    @property
    def effective_rows(self) -> int:
        """Rows one optimizer step learns from, over all data-parallel ranks."""
        return int(self.args.per_device_train_batch_size * self.args.world_size)

    def _repr_html_(self) -> str:
        from memfit.report.notebook import notebook_html

        return notebook_html(self)

    def loss_weight(self, inputs: Batch) -> float:
        """What the mean loss over these rows is a mean of: their number, or their class weights.

        Override it beside a `compute_loss` that divides by something else than the rows.
        """
        label_name = self.label_names[0] if self.label_names else "labels"
        if isinstance(self.compute_loss_func, ClassWeightedLoss):
            labels = inputs.get(label_name)
            if labels is not None:
                return self.compute_loss_func.weight_of(labels)
        elif self.compute_loss_func is not None or self.setup.sees_inputs:
            told = bool(getattr(self, "_loss_shifts_labels", False))
            return counted_items(inputs, label_name, shifted=told)
        return counted_labels(inputs, label_name, shifted=self._shifts(inputs, label_name))

    def _shifts(self, inputs: Batch, label_name: str) -> bool:
        """Whether the loss leaves out each row's first label; the head is run once to find out.

        Bart and XLNet are causal by their names and do not shift. A loss of the user's, or a model
        that all ranks must run together, is only looked at by its name.
        """
        labels = inputs.get(label_name) if isinstance(inputs, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() < 2:
            return False
        if self._shifts_labels is None:
            ours = type(self).compute_loss is transformers.Trainer.compute_loss
            alone = not self.setup.sharded and not self.args.torch_compile
            # A head that nobody knows might look up the label -100 where no row has it.
            known = type(unwrap(self.model)).__module__.startswith("transformers.")
            ignores = known or bool(labels.eq(IGNORED_LABEL).any())
            may_try = ours and alone and ignores
            one = only_first_label(inputs, label_name) if may_try else None
            if one is None:
                return shifts_labels(self.model)
            model: nn.Module = self.model
            training = model.training
            model.eval()
            with preserved_rng(), torch.no_grad():
                loss = self._micro_batch_loss(model, self._prepare_inputs(one), 1.0)
            model.train(training)
            self._shifts_labels = not loss.isfinite().item() or loss.item() == 0
        return self._shifts_labels

    def _may_cut(self, batches: Sequence[Batch]) -> bool:
        """Whether micro-batches add up: one share for every part of the loss, one update."""
        if self.steps_in_backward:
            self._say_whole(t("the optimizer updates weights inside backward"))
            return False
        if self.compute_loss_func is not None or len(self.label_names) < 2:
            return True
        if type(self).loss_weight is not BudgetTrainer.loss_weight:
            return True
        shifted = self._shifts(batches[0], self.label_names[0])
        parts = [parts_of_loss(one, self.label_names, shifted=shifted) for one in batches]
        if share_alike(parts):
            return True
        names = ", ".join(parts[0])
        self._say_whole(t("the loss adds means over different labels ({names})", names=names))
        return False

    def _say_whole(self, why: str) -> None:
        """Says once that batches are not cut."""
        if not self._said_whole:
            self._said_whole = True
            self.guard.note(why, str(self.guard.settings), str(StepSettings()))

    def create_step_executor(self, micro_batching: MicroBatching) -> StepExecutor:
        """How an effective batch is run; override to run it another way."""
        if self.setup.sees_inputs or shows_tokens(self.model):
            # Nothing is cut off that a loss or an output of this training can show.
            trim = Trim.COUNTED if self.setup.packing is not None else Trim.NONE
        else:
            trim = trimming_for(self.model)
        executor = StepExecutor(
            micro_batching=micro_batching,
            trim=trim,
            weigh=self.loss_weight,
            prepare=self._prepare_inputs,
            loss=self._micro_batch_loss,
            backward=lambda loss: self.accelerator.backward(loss),
            ranks=self.ranks,
            around=tuple(self.setup.around_micro_batch),
            packed=self.setup.packing is not None,
            may_cut=self._may_cut,
        )
        for wrap in self.setup.wrap_executor:
            executor = wrap(executor)
        return executor

    # ---- the Trainer's own methods ----

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | CheckpointSearch | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> TrainOutput:
        """As the Trainer's; `True` takes the newest checkpoint that is whole."""
        self._follow_arguments()
        if self.model_init is not None:
            self.changes.remake_model(kwargs.get("trial", args[0] if args else None))
        elif self.changes.given_back:
            self.changes.take_again()
        self.model_wrapped = self.model  # DDP's buckets are of the parameters there were before
        begun = self.state.global_step
        try:
            return self._train(resume_from_checkpoint, *args, **kwargs)
        except BaseException:
            untrained = self.state.global_step == begun and self.setup.model is not None
            if untrained and not self.setup.sharded:  # such a model stays divided
                self.changes.give_back()  # the model is left as it was
            raise

    def _train(self, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> TrainOutput:
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ModelError(
                "no parameter of the model is trainable: every requires_grad is False; "
                "leave at least the classification head unfrozen"
            )
        checkpoint = self.checkpoints.continue_from(resume_from_checkpoint)
        begins = t("preparing the first step …")
        if checkpoint is not None:
            begins = t("loading {checkpoint} …", checkpoint=checkpoint.name)
            warn_of_other_cut(checkpoint, self.guard.micro_batching)
            ranks = self.ranks.count
            if (rows := rows_of_each_rank(checkpoint, self.effective_rows, ranks)) is not None:
                self.args.per_device_train_batch_size = self._train_batch_size = rows
        bars = [o for o in self.callback_handler.callbacks if isinstance(o, MemfitProgress)]
        for bar in bars:
            bar.read_tokens = lambda: self.guard.tokens
        try:
            with self.checkpoints.ending_in_words(), contextlib.ExitStack() as around:
                for context in self.setup.around_training:
                    around.enter_context(context())
                around.enter_context(self.guard.held())
                around.enter_context(self._preparing)
                self._preparing.enter_context(doing(begins))
                # Graphs hold the libraries' workspaces by their addresses, and memory.
                around.callback(self.guard.drop_graphs)
                return super().train(str(checkpoint) if checkpoint else None, *args, **kwargs)
        finally:
            for bar in bars:
                bar.close()

    def prepare_steps(self, loader: Any) -> None:
        """Prepares the first step, after everything is loaded."""
        if self.ranks.number > 0 and self.state.global_step == 0 and is_cuda(self.args.device):
            # Other rows get other dropout. The host's generator may decide the order of rows.
            torch.cuda.manual_seed(self.args.seed + self.ranks.number)
        if self.optimizer is not None:
            ours = self.setup.sink is not None or self.setup.sharded
            self.steps_in_backward = not ours and steps_in_backward(self.model, self.optimizer)
            if self.steps_in_backward and self._folded > 1:
                raise ConfigError(layerwise_accumulation(type(unwrapped(self.optimizer)).__name__))
            allocate_state(unwrapped(self.optimizer))
        if not self.setup.sharded:  # a part says nothing of a checkpoint's size
            self.checkpoints.check()
        self.guard.prepare(loader)
        self._preparing.close()

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As the Trainer's."""
        self._follow_arguments()
        return super().predict(*args, **kwargs)

    def _follow_arguments(self) -> None:
        """Do what the Trainer does when its arguments are changed after it was made.

        `args` are a copy of the user's with the accumulation folded into the batch.
        """
        now = _fields(self.user_args)
        changed = {name for name, value in now.items() if value != self._args_seen[name]}
        if changed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # said when the trainer was made
                effective = effective_arguments(self.user_args)
            # Like the Trainer's own, the rows of a batch are those it was made with.
            for name in changed - {"per_device_train_batch_size"}:
                setattr(self.args, name, getattr(effective, name))
            self._args_seen = now
        steps = accumulation_steps(self.user_args)
        if "gradient_accumulation_steps" in changed and steps != self._folded:
            self.args.gradient_accumulation_steps = 1
            self._fold(steps)
        elif self.args.gradient_accumulation_steps != 1:  # set on trainer.args
            self._fold(self.args.gradient_accumulation_steps)

    def _fold(self, steps: int) -> None:
        """Makes effective batches from this many device batches."""
        rows = self.args.per_device_train_batch_size // self._folded
        self.args.per_device_train_batch_size = rows * steps
        self.args.gradient_accumulation_steps = 1
        self._folded = steps
        self._train_batch_size = self.args.train_batch_size
        self.accelerator.gradient_accumulation_steps = 1

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; FSDP2 has a model that is divided, so DDP does not wrap it."""
        super().create_accelerator_and_postprocess()
        if (ddp := self.accelerator.ddp_handler) is not None:
            ddp.gradient_as_bucket_view = True  # gradients once they are summed, and no copy
        if self.setup.sharded:
            prepare = self.accelerator.prepare_model
            self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; accelerate knows no other word for DDP's buffers yet."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As the Trainer's, called once a training; the plan may have needed the model earlier."""
        return self.changes.hand_out_model(trial)

    def _hp_search_setup(self, trial: Any) -> None:
        """As the Trainer's; a batch size that is searched for is that of a device, too."""
        if self.hp_search_backend is None or trial is None:
            super()._hp_search_setup(trial)
            return
        self.args.per_device_train_batch_size //= self._folded
        self.args.gradient_accumulation_steps = self._folded
        super()._hp_search_setup(trial)
        steps, self._folded = self.args.gradient_accumulation_steps, 1
        self._fold(steps)

    def training_step(
        self,
        model: nn.Module,
        inputs: Batch,
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """The gradient of one effective batch, however many micro-batches it takes."""
        model.train()
        if callable(to_training := getattr(self.optimizer, "train", None)):
            to_training()  # schedule-free optimizers keep two sets of weights
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        if kind_of(self.args.device) == "cpu":
            self.heap.step()
        self.noise.begin_step(inputs)

        def usual() -> torch.Tensor:
            """The mean of the steps since the last line of the log."""
            return self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)

        with meeting():
            return self.health.keep(self.guard.run(model, inputs), usual)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        for before_move in self.setup.before_move:
            before_move(device)
        super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As the Trainer's, or the optimizer a strategy brings; its updates end once begun."""
        if self.optimizer is None and self.setup.make_optimizer is not None:
            decayed = set(self.get_decay_parameter_names(self.model))
            named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {
                    "params": [p for n, p in named if (n in decayed) == decays],
                    "weight_decay": self.args.weight_decay if decays else 0.0,
                }
                for decays in (True, False)
            ]
            self.optimizer = self.setup.make_optimizer(groups, self.args)
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        room_bytes, drop_graphs = lambda: self.guard.room_bytes(), lambda: self.guard.drop_graphs()
        self.health.prepare()
        careful(optimizer, self.args.device, room_bytes, drop_graphs)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        with self.guard.retrying():
            if self.setup.sink is None:
                return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
            return self._sink_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """As the Trainer's; health looks at loss and norm before the optimizer's step."""
        with self.guard.retrying():
            if self.setup.sink is None:
                norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
                norm = norm.full_tensor() if is_divided(norm) else norm
            else:
                norm = self._sink_norm()
            if self.health.leaves_out(norm):
                model.zero_grad()  # an optimizer without gradients does nothing
                return torch.zeros_like(norm) if isinstance(norm, torch.Tensor) else norm
            return norm

    def _sink_norm(self) -> Any:
        """The norm of what the sink has taken, by which it clips; None where it has none.

        No weight moves here: the optimizer's step makes the updates. Two kinds were made before,
        inside `training_step`: of gradients released in backward, and of a step replayed as one
        CUDA graph (`GraphedExecutor`). docs/python-api.md says what callbacks see then.
        """
        sink: Any = self.setup.sink
        norm = sink.measure()
        return norm if getattr(sink, "measures", True) else None

    def floating_point_ops(self, inputs: Batch) -> int:
        """As the Trainer's, which walks through all parameters at every step."""
        if self._learning_flops is None:
            one = {"input_ids": torch.zeros(1, 1, dtype=torch.long)}
            self._learning_flops = int(super().floating_point_ops(one))
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        return self._learning_flops * (ids.numel() if isinstance(ids, torch.Tensor) else 0)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """As the Trainer's; packed first, where that strategy is used."""
        packing, inside = self.setup.packing, self.setup.sees_inputs or shows_tokens(self.model)
        if packing is not None and not inside and isinstance(inputs, Mapping):
            inputs = dict(packing.inputs_of(inputs)) if "input_ids" in inputs else inputs
        prepared: Batch = super()._prepare_inputs(inputs)
        return prepared

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> micro_batches.Prediction:
        """The same micro-batches as in training; what comes out does not stay on the device."""
        step = super().prediction_step
        rows, own = micro_batches.row_count(inputs), self._own_rows(inputs)

        def predict(parts: list[MicroBatch]) -> micro_batches.Prediction:
            outcomes = []
            for part in self._in_step(parts):
                outcome = step(model, part.inputs, prediction_loss_only, ignore_keys)
                outcomes.append(micro_batches.to_cpu(outcome))
            weights = [self.loss_weight(part.inputs) for part in parts]
            return micro_batches.merged_predictions(parts, weights, outcomes[: len(parts)])

        if own < rows:
            inputs = micro_batches.rows_of(inputs, list(range(own)))
        predicted: micro_batches.Prediction = self.guard.evaluate(inputs, predict)
        if self.ranks.is_alone:
            return predicted
        # The Trainer gathers them from all ranks, as many of each, where collectives can.
        filled = torch.arange(rows).clamp(max=own - 1)
        loss, *answers = predicted
        answers = recursively_apply(lambda one: one[filled].to(self.args.device), answers)
        return (None if loss is None else loss.to(self.args.device), *answers)

    def _own_rows(self, inputs: Batch) -> int:
        """Rows of an evaluation's batch that are no repetition, at least one.

        accelerate fills up the last batches with rows of the first, and drops their answers; their
        losses would still be part of a mean.
        """
        rows = micro_batches.row_count(inputs)
        state = self.accelerator.gradient_state
        if self.ranks.is_alone or not state.end_of_dataloader or state.remainder <= 0:
            return rows
        own = int(state.remainder) - rows * self.ranks.number
        return min(max(own, 1), rows)

    def _in_step(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        """As many as on the other ranks, where these meet in every layer."""
        if not self.executor.in_step:
            return parts
        (most,) = self.ranks.largest(len(parts))
        return parts + parts[:1] * (int(most) - len(parts))

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's; keeps the predictions for its own rows."""
        self._follow_arguments()
        self._keeps_predictions = eval_dataset is None
        try:
            metrics: dict[str, float] = super().evaluate(eval_dataset, *args, **kwargs)
            return metrics
        finally:
            self._keeps_predictions = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the Trainer's, in the budget, without a trace in the training's random numbers."""
        loader: Any = kwargs.get("dataloader", args[0] if args else None)
        rows = len(loader.dataset) if hasattr(getattr(loader, "dataset", None), "__len__") else 0
        said = t("evaluating {rows} rows …", rows=f"{rows:,}")
        with preserved_rng(), self.guard.held(), doing(said):
            output = super().evaluation_loop(*args, **kwargs)
        if self._keeps_predictions:
            best = self.state.best_global_step
            kept = {step: one for step, one in self._predictions.items() if step == best}
            self._predictions = kept | {self.state.global_step: logits_and_labels(output)}
        return output

    def known_predictions(self) -> tuple[Any, Any] | None:
        """Logits and labels of the evaluation rows by the model as it is now, if it was evaluated.

        After a training that loads its best model, that is the evaluation of the best step.
        """
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or best is None:
            return self._predictions.get(self.state.global_step)
        return self._predictions.get(step_of(Path(best)) or -1)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """As the Trainer's; memfit's progress bar takes the place of the stock one."""
        super().add_callback(callback)
        callbacks = list(self.callback_handler.callbacks)
        if any(isinstance(one, MemfitProgress) for one in callbacks):
            for one in callbacks:
                if type(one).__name__ in _STOCK_BARS:
                    self.remove_callback(one)

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done, and the weights not half replaced by the best ones."""
        steps = self.state.max_steps
        return 0 < steps <= self.state.global_step and not self.checkpoints.loading_best

    # ---- loading rows ----

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> DataLoader[Any]:
        """As the Trainer's, on the CPU, from the rows a strategy has put in the place of these.

        Of a training every rank reads the whole effective batch and keeps its share.
        """
        own = self.data_collator
        dataset, self.data_collator = self.setup.data_for(dataset, own)
        loads = super()._get_dataloader
        try:
            if self.ranks.is_alone or description.lower() != "training":
                return kept_on_cpu(loads(dataset, description, batch_size, *args, **kwargs))
            self.data_collator = ShareOfRank(self.data_collator, self.ranks)
            batch_size *= self.ranks.count
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            with prepared_alone(self.accelerator, seed):
                return kept_on_cpu(loads(dataset, description, batch_size, *args, **kwargs))
        finally:
            self.data_collator = own

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        return repeatable(super()._get_train_sampler(train_dataset), self.args)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        return in_order(super()._get_eval_sampler(eval_dataset), eval_dataset)

    # ---- saving and loading ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; a checkpoint says how batches are run, a model has all its bits."""
        self._whole_weights = self.setup.whole_weights()
        super().save_model(output_dir, _internal_call)
        self._whole_weights = None
        if self.args.should_save:
            if self.checkpoints.writing:
                used = self.guard.used or self.micro_batching
                record_micro_batching(str(output_dir), used, self.effective_rows)
            else:  # an upload saves by an internal call, too
                self.masters.export(Path(str(output_dir or self.args.output_dir)))

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        with arguments_as_given(self):
            super()._save(output_dir, self._whole_weights if state_dict is None else state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        write = functools.partial(super()._save_checkpoint, model, trial)
        folder = Path(self._get_output_dir(trial))
        saved = self.checkpoints.save(folder, write, check=self.health.check)
        if self.checkpoints.push_due:
            self._push_from_checkpoint(str(saved))

    def _get_output_dir(self, trial: Any) -> str:
        return self.checkpoints.folder_for(str(super()._get_output_dir(trial)))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As the Trainer's, which uploads in the background: only after the folder has its name."""
        if self.checkpoints.writing:
            self.checkpoints.push_due = True
            return
        with arguments_as_given(self):
            self.masters.push(Path(checkpoint_folder), super()._push_from_checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        load = functools.partial(super()._init_training_state, *args, **kwargs)
        return self.checkpoints.load_state(load)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with reading(resume_from_checkpoint), same_parameters(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the Trainer's; a state that is divided among the ranks is gathered first."""
        if not self.setup.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        whole = gathered(unwrapped(self.optimizer).state_dict())
        if self.args.should_save:
            torch.save(whole, Path(output_dir) / "optimizer.pt")
            schedule: Any = self.lr_scheduler
            torch.save(schedule.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            if self.ranks.is_alone or checkpoint is None:
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                self._load_state_of_rank(Path(checkpoint))

    def _load_state_of_rank(self, checkpoint: Path) -> None:
        """As the Trainer's, which would bring a second copy of the state to every card first."""
        paths = [checkpoint / name for name in ("optimizer.pt", "scheduler.pt")]
        if not all(path.is_file() for path in paths):
            return
        # Mapped: a rank reads what it keeps. On a CPU the state would stay in the file.
        mapped = kind_of(self.args.device) != "cpu"
        optimizer, schedule = (
            torch.load(path, map_location="cpu", mmap=mapped, weights_only=True) for path in paths
        )
        if self.setup.sharded:
            optimizer = optimizer_parts(unwrapped(self.optimizer), optimizer)
        self.optimizer.load_state_dict(optimizer)  # type: ignore[union-attr]
        self.lr_scheduler.load_state_dict(schedule)  # type: ignore[union-attr]

    def _load_scaler(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        self.checkpoints.load_best(super()._load_best_model, self.masters.load)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; what one rank wants after a step, all ranks do.

        A signal or a time limit may reach one rank only, and the others would wait for it.
        """
        control = self.control
        wanted = self.ranks.largest(*(getattr(control, flag) for flag in _WANTED))
        for flag, value in zip(_WANTED, wanted, strict=True):
            setattr(control, flag, bool(value))
        return super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, once the numbers of all steps have been looked at."""
        self.health.watch.settle()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, without the norm of a step that overflowed: JSON has no word for it."""
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            logs = {name: value for name, value in logs.items() if name != "grad_norm"}
        super().log(logs, *args, **kwargs)

    # ---- inside ----

    def evaluating_executor(self) -> StepExecutor:
        """How a batch is cut to be predicted: as in training, unless the outputs show padding."""
        if shows_tokens(self.model):
            return dataclasses.replace(self.executor, trim=Trim.NONE, packed=False)
        return self.executor

    def _micro_batch_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        weight: float,  # noqa: ARG002
    ) -> torch.Tensor:
        # What divides a sum by the number of items gets this micro-batch's own: that is a mean.
        items = None
        if self.compute_loss_func is not None or self.setup.sees_inputs:
            items = self._get_num_items_in_batch([inputs], self.args.device)
        with self.compute_loss_context_manager():
            if items is None:
                loss = self.compute_loss(model, inputs)
            else:
                loss = self.compute_loss(model, inputs, num_items_in_batch=items)
        assert isinstance(loss, torch.Tensor)
        # 1, unless accumulation was set on trainer.args after the trainer was made.
        return loss / getattr(self, "current_gradient_accumulation_steps", 1)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """As the Trainer's, but the model does not get the count, and takes a mean."""
        accepted = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = self._stock_counts_items
        try:
            return super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self.model_accepts_loss_kwargs = accepted

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """As the Trainer's, without counting: every micro-batch counts its own."""
        del device
        return list(itertools.islice(epoch_iterator, num_batches)), None


def check_half_weights(model: nn.Module) -> None:
    """Raises ConfigError for weights in half precision on a CPU that cannot multiply them."""
    types = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    for dtype in sorted(types & set(TYPES)):
        if reason := half_on_cpu().reason(dtype):
            raise ConfigError(
                "the weights are {dtype}, and {reason}; load them in float32 (leave --dtype out)",
                dtype=dtype,
                reason=reason,
            )


class _BeforeTraining(TrainerCallback):
    """Prepares the steps when everything is loaded and nothing has begun."""

    def __init__(self, trainer: BudgetTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **parts: Any) -> None:
        """Called by the Trainer."""
        self._trainer.prepare_steps(parts.get("train_dataloader"))


def _fields(args: transformers.TrainingArguments) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
