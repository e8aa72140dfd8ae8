"""A plan as a file: written, edited, read back, checked, handed to the stock Trainer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from planner_fixtures import BERT_LARGE, SMALL, bert, laptop, planned, task, within

from memfit.config import files
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import ConfigError
from memfit.planner.plan import Plan, check, digest_of, settings_of
from memfit.strategies import (
    ActivationOffload,
    Checkpointing,
    CudaGraphs,
    Freezing,
    FusedLayers,
    GradientRelease,
    HalfPrecision,
    Lora,
    LowBitAdamW,
    OptimizerOffload,
    Packing,
    SmallStateOptimizer,
    Strategy,
    Truncation,
    ordered,
)

TASK, BUDGET = BERT_LARGE, 4 * 10**9


def plan_with(*strategies: Strategy, tokens: int | None = None) -> Plan:
    return Plan(
        strategies=tuple(ordered(strategies)),
        micro_batching=MicroBatching(max_tokens=tokens),
        digest=digest_of(within(TASK, BUDGET, laptop())),
        args=TASK.args,
    )


@cache
def chosen() -> Plan:
    """A small model in 4 GB."""
    return planned(SMALL, BUDGET, laptop()).chosen


@pytest.mark.parametrize(
    "plan",
    [
        plan_with(),
        plan_with(Packing(), FusedLayers(), Checkpointing(9), LowBitAdamW(16), CudaGraphs()),
        plan_with(Packing(), Checkpointing(), LowBitAdamW(24, "float16"), tokens=777),
        plan_with(LowBitAdamW(), GradientRelease("host")),
        plan_with(OptimizerOffload(True, "bfloat16"), ActivationOffload(3, 1 << 20)),
        plan_with(HalfPrecision("float16"), SmallStateOptimizer(), Truncation(64)),
        plan_with(Freezing(7)),
        plan_with(Freezing("encoder", 0.01)),
        plan_with(Lora(16, alpha=4, dropout=0.1, fresh=("pooler", "head"))),
    ],
)
def test_plan_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.toml")
    plan.write(path)
    read = Plan.read(path)
    assert (read.strategies, read.micro_batching) == (plan.strategies, plan.micro_batching)
    assert read.digest == plan.digest
    assert read.fidelity is plan.fidelity


def test_file_has_figures_and_reasons(tmp_path: Path) -> None:
    plan = chosen()
    assert plan.price is not None
    path = tmp_path / "plan.toml"
    plan.write(path)
    tables = files.read_toml(path)
    predicted = tables["predicted"]
    assert predicted["device_peak_bytes"] == plan.price.device_bytes
    held = sum(predicted["components"].values()) - predicted["components"]["context"]
    assert held == predicted["peak_allocated_bytes"]
    assert predicted["step_seconds"] == plan.price.step_seconds
    assert "of every batch" in tables["reasons"]["packing"]
    assert Plan.read(path).strategies == plan.strategies


def test_tables_in_one_line_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan = plan_with(Packing(), Checkpointing(9), Lora(16, fresh=("pooler", "head")), tokens=700)
    plan.write(path)
    tables = files.read_toml(path)
    lora = 'lora = {rank = 16, dropout = 0.0, fresh = ["pooler", "head"]}'
    path.write_text(
        'version = 1\nfidelity = "capacity"\n\n[workload]\n'
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in tables["workload"].items())
        + "\n[micro_batching]\nmax_tokens = 700\n\n[strategies]\npacking = {}\n"
        + f'checkpointing = {{layers = 9, part = "layer"}}\n{lora}\n'
    )
    assert Plan.read(path).strategies == plan.strategies


def test_edited_file_is_the_edited_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan_with(Packing(), Checkpointing(9)).write(path)
    path.write_text(path.read_text().replace("layers = 9", "layers = 12"))
    assert Checkpointing(12) in Plan.read(path).strategies


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[strategies.checkpointing]", "[strategies.checkpointin]", "Did you mean 'checkpointing'"),
        ("layers = 9", "layer = 9", "Did you mean 'layers'"),
        ("layers = 9", 'layers = "nine"', "is not a whole number"),
        ("layers = 9", "layers = true", "is not a whole number"),
        ("layers = 9", "layers = 0", "at least 1 layer"),
        ("layers = 9", 'part = "half"', "has no setting 'part'"),
        ("layers = 9", 'part = "mlp"', "halves of layers are no longer recomputed"),
        (
            "[strategies.packing]",
            '[strategies.gradient_release]\nmode = "two_pass"',
            "instead of 'two_pass' take 'kept8'",
        ),
        ("[strategies.packing]", "[strategies]\npacking = 1", "write packing = {}"),
        ("[strategies.", "[strategy.", "Did you mean 'strategies'"),
        ("version = 1", "version = 9", "version 9"),
        ("max_tokens = 700", "max_token = 700", "Did you mean 'max_tokens'"),
        ("rows = 6988\n", "", "rows is missing"),
    ],
)
def test_wrong_file_is_refused_with_what_is_right(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    plan_with(Packing(), Checkpointing(9), tokens=700).write(path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=message):
        Plan.read(path)


def test_strategies_that_conflict_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan_with(LowBitAdamW()).write(path)
    path.write_text(path.read_text() + "\n[strategies.half_precision]\n")
    with pytest.raises(ConfigError, match="cannot be used together"):
        Plan.read(path)


def test_settings_that_are_not_set_are_not_written() -> None:
    assert settings_of(Checkpointing()) == {}
    assert settings_of(OptimizerOffload()) == {"weights": False}


def test_check_says_whether_it_still_fits_and_what_changed() -> None:
    plan = chosen()
    assert plan.price is not None
    same = check(plan, within(SMALL, BUDGET, laptop()))
    assert same.fits
    assert same.plan.price == plan.price
    assert same.changed == ()
    assert same.missing_bytes == 0
    less = plan.price.device_bytes - 12345
    short = check(plan, within(SMALL, less, laptop()))
    assert not short.fits
    assert short.missing_bytes == 12345
    assert short.changed == (f"budget_bytes: {BUDGET} -> {less}",)


def test_check_prices_another_task() -> None:
    longer = task(bert(6, 128, 500), lengths=(512,) * 400)
    before = plan_with(Packing(), LowBitAdamW())
    checked = check(before, within(longer, 4 * 10**8, laptop()))
    assert not checked.fits
    assert any(change.startswith("longest_tokens: 128 -> 512") for change in checked.changed)


def test_stock_arguments_keep_the_effective_batch() -> None:
    plan = plan_with(Packing(), Checkpointing(9), LowBitAdamW(), tokens=700)
    args = plan.training_arguments()
    assert args.per_device_train_batch_size == 4
    assert args.gradient_accumulation_steps == 8
    assert args.gradient_checkpointing
    assert args.bf16
    assert not args.fp16
    assert TASK.args.per_device_train_batch_size == 32
    assert not TASK.args.bf16
    assert plan.beyond_stock == ("packing", "lowbit_adamw")


def test_stock_arguments_of_a_plain_plan_are_the_users() -> None:
    args = plan_with().training_arguments()
    assert args.per_device_train_batch_size == 32
    assert args.gradient_accumulation_steps == 1
    assert not args.gradient_checkpointing
    assert not args.bf16
    assert args.optim == TASK.args.optim


def test_stock_arguments_take_the_small_state_optimizer() -> None:
    args = plan_with(SmallStateOptimizer(), HalfPrecision("float16")).training_arguments()
    assert args.optim == "adafactor"
    assert args.fp16


def test_plan_from_a_file_needs_arguments_to_build_on(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan_with(Packing()).write(path)
    read = Plan.read(path)
    with pytest.raises(ConfigError, match="TrainingArguments"):
        read.training_arguments()
    assert read.training_arguments(TASK.args).per_device_train_batch_size == 32


def test_json_has_the_names_of_the_design() -> None:
    shown = chosen().as_json()
    assert {"fidelity", "strategies", "components", "step_seconds"} <= shown.keys()
    assert {"peak_allocated_bytes", "peak_reserved_bytes", "device_peak_bytes"} <= shown.keys()
    assert shown["fidelity"] == "rounding"
