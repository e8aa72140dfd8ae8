"""TrainingArguments' fields as flags: the spellings people use, and what is left for typer."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from memfit._compat import OLD_FIELDS
from memfit.cli.options import OwnOption, _cli_type, split_flags
from memfit.config import DataConfig
from memfit.errors import ConfigError

OWN = {
    "model": OwnOption("--model"),
    "max_length": OwnOption("--max-length"),
    "label_names": OwnOption("--label-names", "several"),
    "from_scratch": OwnOption("--from-scratch", "switch"),
    "no_from_scratch": OwnOption("--no-from-scratch", "alone"),
    "json": OwnOption("--json", "alone"),
}


def training(*words: str) -> dict[str, Any]:
    rest, fields = split_flags(words, OWN)
    assert rest == []
    return fields


@pytest.mark.parametrize(
    "words",
    [
        ("--learning-rate", "3e-5"),
        ("--learning_rate", "3e-5"),
        ("--learning-rate=3e-5",),
        ("--learning_rate=3e-5",),
    ],
)
def test_dashes_underscores_and_signs_are_the_same(words: tuple[str, ...]) -> None:
    assert training(*words) == {"learning_rate": 3e-5}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--bf16",), True),
        (("--bf16", "true"), True),
        (("--bf16=True",), True),
        (("--no-bf16",), False),
        (("--no_bf16",), False),
        (("--bf16", "false"), False),
        (("--bf16=0",), False),
    ],
)
def test_a_switch_stands_alone_or_takes_a_truth_value(words: tuple[str, ...], value: bool) -> None:
    assert training(*words) == {"bf16": value}


def test_a_switch_leaves_the_word_after_it_alone() -> None:
    assert split_flags(["--bf16", "data.csv"], OWN) == (["data.csv"], {"bf16": True})


def test_a_switch_takes_the_words_it_knows() -> None:
    assert training("--include-num-input-tokens-seen", "all") == {
        "include_num_input_tokens_seen": "all"
    }
    assert training("--include-num-input-tokens-seen") == {"include_num_input_tokens_seen": True}


def test_values_get_their_fields_types() -> None:
    assert training(
        "--batch-size", "16", "--epochs", "2", "--max-steps", "-1", "--optim", "adafactor",
        "--lr-scheduler-kwargs", '{"num_cycles": 2}', "--report-to", "tensorboard", "wandb",
        "--include-for-metrics", "inputs", "--include-num-input-tokens-seen=all",
        "--warmup-steps", "0.1", "--run-name", "7",
    ) == {
        "per_device_train_batch_size": 16,
        "num_train_epochs": 2.0,
        "max_steps": -1,
        "optim": "adafactor",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "report_to": ["tensorboard", "wandb"],
        "include_for_metrics": ["inputs"],
        "include_num_input_tokens_seen": "all",
        "warmup_steps": 0.1,
        "run_name": "7",
    }  # fmt: skip


def test_one_value_of_a_field_that_takes_one_or_several_stays_one() -> None:
    assert training("--report-to", "none") == {"report_to": "none"}


def test_the_commands_own_options_are_left_for_typer() -> None:
    rest, fields = split_flags(
        ["--label-names", "0=壞", "1=好", "data.csv", "--max_length", "64", "--from-scratch",
         "false", "-q", "--model=m", "--seed", "3"],
        OWN,
    )  # fmt: skip
    assert rest == [
        "--label-names=0=壞",
        "--label-names=1=好",
        "data.csv",
        "--max-length=64",
        "--no-from-scratch",
        "-q",
        "--model=m",
    ]
    assert fields == {"seed": 3}


def test_the_commands_take_several_label_names() -> None:
    assert _cli_type(typing.get_type_hints(DataConfig)["label_names"]) == list[str] | None


def test_an_option_that_stands_alone_takes_no_word() -> None:
    words = ["--json", "false", "--no_from_scratch", "true"]
    assert split_flags(words, OWN)[0] == ["--json", "false", "--no-from-scratch", "true"]


def test_a_command_without_training_has_no_training_flags() -> None:
    with pytest.raises(ConfigError, match=r"no option --bf16\.$"):
        split_flags(["--bf16"], OWN, training=False)
    assert split_flags(["--max_length", "3"], OWN, training=False) == (["--max-length=3"], {})


def test_after_two_dashes_nothing_is_a_flag() -> None:
    assert split_flags(["--", "--bf16"], OWN) == (["--", "--bf16"], {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lerning-rate", "1"), r"no option --lerning-rate\. Did you mean --learning-rate\?"),
        (("--max-lenght", "1"), r"Did you mean --max-length\?"),
        (("--epoch", "1"), r"Did you mean --epochs\?"),
        (("--lr", "1"), r"no option --lr\. Did you mean --learning-rate\?"),
        (("--zzzzqq", "1"), r"no option --zzzzqq\.$"),
        (("--learning-rate",), "--learning-rate needs a value"),
        (("--learning-rate", "--bf16"), "--learning-rate needs a value"),
        (("--learning-rate", "fast"), "--learning-rate is 'fast'; it takes a number"),
        (("--max-steps", "1.5"), "--max-steps is '1.5'; it takes a whole number"),
        (("--bf16=maybe",), "--bf16 is 'maybe'; write true or false"),
        (("--lr-scheduler-kwargs", "{x"), "--lr-scheduler-kwargs is not JSON"),
        (("--model",), "--model needs a value"),
    ],
)
def test_a_wrong_flag_is_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_flags(words, OWN)


def test_old_spellings_are_read_too() -> None:
    assert training(
        "--evaluation-strategy", "epoch", "--warmup-ratio", "0.1", "--group-by-length",
        "--logging-dir", "logs", "--no-cuda",
    ) == {
        "evaluation_strategy": "epoch",
        "warmup_ratio": 0.1,
        "group_by_length": True,
        "logging_dir": "logs",
        "no_cuda": True,
    }  # fmt: skip


def test_every_field_is_a_flag() -> None:
    from transformers import TrainingArguments

    for item in dataclasses.fields(TrainingArguments):
        if item.init:
            assert list(split_flags([f"--{item.name}=1"], {})[1]) == [item.name]
    for name in OLD_FIELDS:
        assert list(training(f"--{name.replace('_', '-')}=1")) == [name]
