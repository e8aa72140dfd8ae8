"""memfit.TrainingArguments: transformers' own, and what older tutorials write."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from transformers import HfArgumentParser

from memfit import TrainingArguments
from memfit._compat import OLD_FIELDS
from memfit.config.training_arguments import smaller_is_better
from memfit.errors import ConfigError


def made(tmp_path, **fields):
    return TrainingArguments(str(tmp_path), use_cpu=True, **fields)


@pytest.mark.parametrize(
    ("old", "field", "value", "says"),
    [
        ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch", "now called eval_strategy"),
        ({"per_gpu_train_batch_size": 5}, "per_device_train_batch_size", 5, "per_device_train"),
        ({"per_gpu_eval_batch_size": 6}, "per_device_eval_batch_size", 6, "per_device_eval"),
        ({"push_to_hub_token": "t"}, "hub_token", "t", "now called hub_token"),
        ({"push_to_hub_model_id": "m"}, "hub_model_id", "m", "now called hub_model_id"),
        ({"warmup_ratio": 0.1}, "warmup_steps", 0.1, "write warmup_steps=0.1"),
        ({"warmup_ratio": 0.0}, "warmup_steps", 0, "leave it out"),
        ({"group_by_length": True}, "train_sampling_strategy", "group_by_length", "write train_s"),
        ({"group_by_length": False}, "train_sampling_strategy", "random", "leave it out"),
        ({"adafactor": True}, "optim", "adafactor", "write optim='adafactor'"),
        ({"optim": "adamw_hf"}, "optim", "adamw_torch", "'adamw_torch' is used"),
        ({"optim": "adamw_apex_fused"}, "optim", "adamw_torch_fused", "is used"),
        ({"evaluate_during_training": True}, "eval_strategy", "steps", "write eval_strategy"),
        ({"include_inputs_for_metrics": True}, "include_for_metrics", ["inputs"], "write include"),
        ({"report_to": "None"}, "report_to", [], "now written report_to='none'"),
        ({"report_to": None}, "report_to", [], "now written report_to='none'"),
        ({"report_to": ["None"]}, "report_to", [], "now written report_to='none'"),
        ({"overwrite_output_dir": True}, "output_dir", None, "has no effect any more"),
        ({"logging_dir": "logs"}, "output_dir", None, "TENSORBOARD_LOGGING_DIR"),
        ({"save_safetensors": False}, "output_dir", None, "always saved as safetensors"),
        ({"fp16_opt_level": "O1"}, "output_dir", None, "has no effect any more"),
        ({"tpu_num_cores": 8}, "output_dir", None, "has no effect any more"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_old_spelling_is_taken_and_its_name_of_today_said(tmp_path, old, field, value, says):
    with pytest.warns(FutureWarning) as caught:
        args = made(tmp_path, **old)
    assert getattr(args, field) == (str(tmp_path) if field == "output_dir" else value)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1
    assert next(iter(old)) in messages[0]
    assert says in messages[0]
    assert caught[0].filename == __file__  # it points at the user's line


def test_no_cuda_is_use_cpu(tmp_path):
    with pytest.warns(FutureWarning, match="no_cuda is now called use_cpu"):
        assert TrainingArguments(str(tmp_path), no_cuda=True).use_cpu is True


def test_a_warmup_of_the_whole_training_is_not_a_single_step(tmp_path):
    with pytest.warns(FutureWarning):
        args = made(tmp_path, warmup_ratio=1.0)
    assert args.get_warmup_steps(1000) == 1000
    with pytest.warns(FutureWarning):
        assert made(tmp_path, warmup_ratio=0.1).get_warmup_steps(219) == math.ceil(21.9)


def test_a_field_given_under_both_names_keeps_the_new_one(tmp_path):
    with pytest.warns(FutureWarning):
        args = made(tmp_path, evaluation_strategy="epoch", eval_strategy="no")
    assert args.eval_strategy == "no"


def test_two_old_names_of_one_new_field_are_both_kept(tmp_path):
    with pytest.warns(FutureWarning):
        args = made(tmp_path, dispatch_batches=False, split_batches=True)
    assert args.accelerator_config.dispatch_batches is False
    assert args.accelerator_config.split_batches is True


def test_what_transformers_5_still_has_is_not_called_old():
    today = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert OLD_FIELDS & today == frozenset()


def test_todays_names_are_quiet(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = made(tmp_path, eval_strategy="epoch", report_to="none", learning_rate=2e-5)
    assert args.learning_rate == 2e-5


def test_an_unknown_field_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"no field 'learning_rat'.*'learning_rate'"):
        made(tmp_path, learning_rat=1e-5)


@pytest.mark.parametrize("metric", ["mse", "eval_mae", "rmse", "loss", "val_loss", "max_error"])
def test_errors_are_best_when_smallest(tmp_path, metric):
    assert smaller_is_better(metric)
    assert made(tmp_path, metric_for_best_model=metric).greater_is_better is False


@pytest.mark.parametrize("metric", ["f1", "accuracy", "eval_f1_macro", "neg_mean_squared_error"])
def test_scores_are_best_when_largest(tmp_path, metric):
    assert made(tmp_path, metric_for_best_model=metric).greater_is_better is True


def test_what_the_user_says_about_the_metric_is_kept(tmp_path):
    args = made(tmp_path, metric_for_best_model="mse", greater_is_better=True)
    assert args.greater_is_better is True


def test_it_is_transformers_own_in_every_other_way(tmp_path):
    args = made(tmp_path, seed=7)
    assert isinstance(args, transformers.TrainingArguments)
    assert args.to_dict()["seed"] == 7
    assert dataclasses.replace(args, seed=8).seed == 8
    torch.save(args, tmp_path / "args.bin")
    assert torch.load(tmp_path / "args.bin", weights_only=False).seed == 7
    (parsed,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [
            "--output_dir",
            str(tmp_path),
            "--seed",
            "9",
            "--use_cpu",
            "--metric_for_best_model",
            "mae",
        ]
    )
    assert (type(parsed), parsed.seed, parsed.greater_is_better) == (TrainingArguments, 9, False)


def test_the_names_can_be_asked_for_without_importing_torch():
    code = "import sys, memfit._compat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
