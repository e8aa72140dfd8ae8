"""The arguments as they run: a copy with effective batches; what stands in the way is said."""

from __future__ import annotations

import warnings

import pytest
import transformers

import memfit
from memfit.engine.effective_batch import effective_arguments, effective_rows
from memfit.errors import ConfigError


def made(tmp_path, **fields):
    fields = {"use_cpu": True, "report_to": "none", **fields}
    return transformers.TrainingArguments(str(tmp_path), **fields)


def test_accumulation_becomes_the_batch_and_the_users_object_is_left_alone(tmp_path):
    args = made(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=16)
    before = args.to_dict()
    ours = effective_arguments(args)
    assert (ours.per_device_train_batch_size, ours.gradient_accumulation_steps) == (32, 1)
    assert type(ours) is type(args)
    assert args.to_dict() == before


def test_accumulation_said_to_accelerate_counts_too(tmp_path):
    config = {"gradient_accumulation_kwargs": {"num_steps": 4, "sync_each_batch": True}}
    args = made(tmp_path, per_device_train_batch_size=8, accelerator_config=config)
    assert effective_rows(args) == 32
    ours = effective_arguments(args)
    assert ours.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert args.accelerator_config.gradient_accumulation_kwargs["num_steps"] == 4


def test_plain_arguments_are_quiet(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        effective_arguments(made(tmp_path))


def test_finding_a_batch_size_is_switched_off_and_said(tmp_path):
    with pytest.warns(UserWarning, match="the effective batch does not"):
        assert (
            effective_arguments(made(tmp_path, auto_find_batch_size=True)).auto_find_batch_size
            is False
        )


def test_several_visible_gpus_do_not_become_data_parallel(tmp_path):
    args = made(tmp_path, per_device_train_batch_size=32)
    args._n_gpu = 2
    with pytest.warns(UserWarning, match="2 GPUs are visible and one is used"):
        ours = effective_arguments(args)
    assert (ours.n_gpu, ours.train_batch_size, args.n_gpu) == (1, 32, 2)


def test_fp16_on_a_cpu_is_said_to_do_nothing(tmp_path):
    with pytest.warns(UserWarning, match="fp16 has no effect on a CPU"):
        effective_arguments(made(tmp_path, fp16=True))


@pytest.mark.parametrize("optimizer", ["lomo", "adalomo"])
def test_optimizers_that_step_in_backward_are_refused(tmp_path, optimizer):
    with pytest.raises(ConfigError, match=f"optim='{optimizer}' updates weights inside backward"):
        effective_arguments(made(tmp_path, optim=optimizer))


def test_sharded_training_is_refused(tmp_path):
    args = made(tmp_path)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="does not run with deepspeed"):
        effective_arguments(args)


def test_checkpointing_is_the_kind_that_works_below_frozen_embeddings(tmp_path):
    ours = effective_arguments(made(tmp_path, gradient_checkpointing=True))
    assert ours.gradient_checkpointing_kwargs == {"use_reentrant": False}
    chosen = made(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    )
    assert effective_arguments(chosen).gradient_checkpointing_kwargs == {"use_reentrant": True}


def test_an_error_is_best_when_smallest_with_plain_arguments_too(tmp_path):
    args = made(tmp_path, metric_for_best_model="mse")
    assert args.greater_is_better is True  # what transformers makes of it
    with pytest.warns(UserWarning, match="the smallest is kept"):
        assert effective_arguments(args).greater_is_better is False
    asked = memfit.TrainingArguments(
        str(tmp_path), use_cpu=True, metric_for_best_model="mse", greater_is_better=True
    )
    assert effective_arguments(asked).greater_is_better is True
