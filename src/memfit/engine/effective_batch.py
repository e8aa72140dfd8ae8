"""The user's TrainingArguments as the Trainer runs them: effective batches, no accumulation.

The user's own object is never changed. docs/training-arguments.md lists what is done here.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

from transformers import TrainingArguments

from memfit.config.launched import launched_rank
from memfit.config.training_arguments import TrainingArguments as OurTrainingArguments
from memfit.config.training_arguments import smaller_is_better
from memfit.engine.half_on_cpu import half_on_cpu
from memfit.errors import ConfigError, ConflictError
from memfit.i18n import t
from memfit.memory.device import kind_of

# These step inside backward: a second micro-batch would meet weights that have already moved.
_STEPS_IN_BACKWARD = ("lomo", "adalomo")

_EVAL_BATCHES_ON_DEVICE = 16


def accumulation_steps(args: TrainingArguments) -> int:
    """How many per-device batches make one optimizer step, wherever the user said it."""
    accelerator: Any = args.accelerator_config
    plugin = accelerator.gradient_accumulation_kwargs or {}
    return max(args.gradient_accumulation_steps, int(plugin.get("num_steps", 1)))


def effective_rows(args: TrainingArguments) -> int:
    """Rows of one optimizer step on one device: per-device batch x accumulation.

    With accelerate's `split_batches` a batch is that of all ranks, which share it.
    """
    accelerator: Any = args.accelerator_config
    rows, ranks = args.per_device_train_batch_size, args.world_size
    if accelerator.split_batches:
        if rows % ranks:
            raise ConflictError(
                "split_batches shares a batch of {rows} rows among {ranks} processes; give it "
                "a number of rows that they divide",
                rows=rows,
                ranks=ranks,
            )
        rows //= ranks
    return rows * accumulation_steps(args)


def effective_arguments(args: TrainingArguments) -> TrainingArguments:
    """A copy whose batch is the effective batch; what cannot work with that is refused."""
    _refuse(args)
    ours = copy.copy(args)
    accelerator: Any = copy.deepcopy(args.accelerator_config)
    if accelerator.gradient_accumulation_kwargs:
        accelerator.gradient_accumulation_kwargs.pop("num_steps", None)
    ours.accelerator_config = accelerator
    ours.per_device_train_batch_size = effective_rows(args)
    if accelerator.split_batches:  # the batches given are those of all ranks
        accelerator.split_batches = False
        ours.per_device_eval_batch_size = max(args.per_device_eval_batch_size // args.world_size, 1)
    ours.gradient_accumulation_steps = 1
    # Micro-batches are weighted over all ranks in engine/executors.py already.
    ours.average_tokens_across_devices = False
    _replace_what_stands_in_the_way(ours)
    if ours.gradient_checkpointing:
        # The reentrant kind finds no gradient below a frozen embedding.
        chosen = dict(ours.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type]
        ours.gradient_checkpointing_kwargs = {"use_reentrant": False, **chosen}
    # Ranks run different numbers of micro-batches, so that buffers cannot be sent before each.
    ours.ddp_broadcast_buffers = False
    checkpointing: Any = ours.gradient_checkpointing_kwargs or {}
    if ours.ddp_find_unused_parameters is None and not checkpointing.get("use_reentrant"):
        ours.ddp_find_unused_parameters = True  # layers are recomputed without reentering autograd
    if ours.eval_accumulation_steps is None and ours.include_for_metrics:
        # What prediction_step hands out is on the CPU already; the inputs are not.
        ours.eval_accumulation_steps = _EVAL_BATCHES_ON_DEVICE
    return ours


def leave_out_refused_half(ours: TrainingArguments) -> None:
    """On a CPU, turn off half precision whose instructions it does not run; asking warns of it."""
    asked = [one for one in ("bf16", "bf16_full_eval", "fp16_full_eval") if getattr(ours, one)]
    for name in asked:
        if not half_on_cpu().works("bfloat16" if name.startswith("bf16") else "float16"):
            setattr(ours, name, False)
            if name == "bf16":
                ours.mixed_precision = "no"  # the Trainer makes its Accelerator from this


def _refuse(args: TrainingArguments) -> None:
    accelerator: Any = args.accelerator_config
    if args.gradient_accumulation_steps > 1 and "num_steps" in (
        accelerator.gradient_accumulation_kwargs or {}
    ):
        raise ConflictError(
            "The `AcceleratorConfig`'s `num_steps` is set but "
            "`gradient_accumulation_steps` is greater than 1, too: leave one of them out"
        )
    count = launched_rank().world_size
    if count > 1 and args.world_size == 1:
        raise ConfigError(
            "this is one of {count} processes, and these TrainingArguments would train it "
            "alone; on a CPU add use_cpu=True to them, or take memfit.TrainingArguments",
            count=count,
        )
    sharded = [name for name in ("deepspeed", "fsdp", "parallelism_config") if getattr(args, name)]
    if sharded:
        raise ConfigError(
            "BudgetTrainer does not run with {name}: it decides itself what is on the "
            "device; use one process a GPU (torchrun), or transformers.Trainer",
            name=sharded[0],
        )
    name = str(getattr(args.optim, "value", args.optim))
    if name.endswith("layerwise") and accumulation_steps(args) > 1:
        raise ConfigError(layerwise_accumulation(name))
    if args.optim in _STEPS_IN_BACKWARD:
        raise ConfigError(
            "optim={name} updates weights inside backward and cannot take an effective "
            "batch in parts; choose another optimizer",
            name=repr(name),
        )


def layerwise_accumulation(name: str) -> str:
    """The sentence for accumulation with an optimizer that transformers refuses it for."""
    return t(
        "{name} updates weights inside backward and does not support gradient accumulation: leave "
        "gradient_accumulation_steps at 1",
        name=name,
    )


def warn_of_conflicts(args: TrainingArguments) -> None:
    """Say which of two arguments that contradict each other counts."""
    default = next(f.default for f in dataclasses.fields(args) if f.name == "num_train_epochs")
    if args.max_steps > 0 and args.num_train_epochs != default:
        said = {"steps": args.max_steps, "epochs": args.num_train_epochs}
        _warn(
            t(
                "max_steps={steps} and num_train_epochs={epochs} are both set: max_steps counts",
                **said,
            )
        )


def _replace_what_stands_in_the_way(ours: TrainingArguments) -> None:
    if ours.auto_find_batch_size:
        ours.auto_find_batch_size = False
        _warn(
            t("auto_find_batch_size is ignored: micro-batches shrink, the effective batch does not")
        )
    if ours.n_gpu > 1:
        _warn(
            t(
                "{count} GPUs are visible and one is used, with an effective batch of {rows}; "
                "start with torchrun to use all",
                count=ours.n_gpu,
                rows=ours.per_device_train_batch_size,
            )
        )
        ours._n_gpu = 1  # what the Trainer itself does to keep nn.DataParallel away
    kind = kind_of(ours.device)
    if kind in ("cpu", "mps"):
        ours.dataloader_pin_memory = False  # there is nothing to pin for, and torch warns
    if ours.fp16 and kind == "cpu":
        _warn(t("fp16 has no effect on a CPU: training runs in the weights' own precision"))
    # It reads every step's loss and so makes a GPU wait; training/health.py looks at them instead.
    ours.logging_nan_inf_filter = False
    metric = ours.metric_for_best_model
    derived = not isinstance(ours, OurTrainingArguments) and ours.greater_is_better
    if metric is not None and derived and smaller_is_better(metric):
        ours.greater_is_better = False
        _warn(
            t(
                "metric_for_best_model={metric} is an error: the smallest is kept as the best",
                metric=repr(metric),
            )
        )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)
