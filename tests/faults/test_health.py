"""Losses that are not finite, weights that do not move, a GPU that is gone: said, and survived."""

# ruff: noqa: ARG002 - the Trainer decides what callbacks are given.
from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import STEPS, STEPS_AN_EPOCH, Logged, counts_of, model_of, texts, trainer_in
from transformers import BertForSequenceClassification, TrainerCallback

from memfit.cli import run
from memfit.errors import ConfigError, DeviceLostError, LossError
from memfit.strategies import GradientRelease, LowBitAdamW
from memfit.training.checkpoints import problem_with
from memfit.training.health import SKIPS_IN_A_ROW, LossWatch, gate_sink, rows_of_step
from memfit.training.saving import is_device_lost

POISON_ROW = 20
POISON = sum(texts()[POISON_ROW]["input_ids"])


class Poisoned(BertForSequenceClassification):
    """Its loss is not a number whenever one certain row is in the batch."""

    factor = math.nan

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, labels=labels, **more)
        if self.training and bool((input_ids.sum(dim=1) == POISON).any()):
            output.loss = output.loss * self.factor
        return output


def poisoned(factor: float = math.nan) -> Poisoned:
    plain = model_of()
    model = Poisoned(plain.config)
    model.load_state_dict(plain.state_dict())
    model.factor = factor
    return model


class Weights(TrainerCallback):
    """All weights after every step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        copied = {name: value.clone() for name, value in model.state_dict().items()}
        self.after[state.global_step] = copied


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def named_rows(sentence: str) -> list[int]:
    found = re.search(r"\(rows ([\d, ]+) of the training dataset\)", sentence)
    assert found, sentence
    return [int(row) for row in found[1].split(",")]


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_the_run_stops_before_the_update_and_names_the_batch(tmp_path: Path, factor: float) -> None:
    trainer = trainer_in(tmp_path / "run", kept := Weights(), model=poisoned(factor))
    trainer.rows_log = tmp_path / "rows.jsonl"
    with pytest.raises(LossError) as caught:
        trainer.train()
    step = trainer.state.global_step + 1
    assert f"the loss is {torch.tensor(factor).item()} in step {step} (rows " in str(caught.value)
    rows = named_rows(str(caught.value))
    assert POISON_ROW in rows
    logged = json.loads(trainer.rows_log.read_text().splitlines()[-1])
    assert logged["rows"] == [sum(texts()[row]["input_ids"]) for row in rows]
    assert same(trainer.model.state_dict(), kept.after[step - 1])
    assert caught.value.last_good == tmp_path / "run" / f"checkpoint-{step - 1}"
    assert problem_with(caught.value.last_good) == ""


@pytest.mark.parametrize("sampling", ["random", "sequential", "group_by_length"])
def test_the_rows_of_every_step_are_those_that_were_trained(tmp_path: Path, sampling: str) -> None:
    trainer = trainer_in(tmp_path / "run", train_sampling_strategy=sampling)
    trainer.rows_log = tmp_path / "rows.jsonl"
    trainer.train()
    for line in trainer.rows_log.read_text().splitlines():
        entry = json.loads(line)
        rows = rows_of_step(trainer.callback_handler.train_dataloader, entry["step"])
        assert rows is not None
        assert entry["rows"] == [sum(texts()[row]["input_ids"]) for row in rows]
    assert entry["step"] == STEPS
    assert rows_of_step(iter(()), 3) is None


def test_an_infinite_gradient_of_a_finite_loss_stops_too(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", kept := Weights(), max_grad_norm=0.0)
    weight = trainer.model.classifier.weight
    weight.register_hook(
        lambda gradient: gradient * (math.inf if trainer.state.global_step == 3 else 1)
    )
    with pytest.raises(LossError, match=r"the gradient is (inf|nan) in step 4 \(rows "):
        trainer.train()
    assert same(trainer.model.state_dict(), kept.after[3])


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    class Break(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                with torch.no_grad():
                    model.classifier.bias[0] = math.inf

    trainer = trainer_in(tmp_path / "run", Break())
    with pytest.raises(LossError, match="after step 3 weights of the model are not finite"):
        trainer.train()
    names = sorted(item.name for item in (tmp_path / "run").iterdir())
    assert names == ["checkpoint-1", "checkpoint-2"]


def skipped_run(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Logged:
    trainer = trainer_in(folder, *callbacks, model=poisoned(), on_nan="skip", **settings)
    with pytest.warns(UserWarning, match="is skipped, the loss is nan: weights and optimizer"):
        trainer.train()
    return trainer


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
def test_a_skipped_step_changes_no_weight_and_every_count_agrees(
    tmp_path: Path, optim: str
) -> None:
    trainer = skipped_run(tmp_path / "run", kept := Weights(), optim=optim)
    skipped = trainer.health.watch.skipped_steps
    assert len(skipped) == STEPS // STEPS_AN_EPOCH  # once an epoch
    kept.after[0] = model_of().state_dict()
    for step in range(1, STEPS + 1):
        assert same(kept.after[step], kept.after[step - 1]) == (step in skipped), step
    last = tmp_path / "run" / f"checkpoint-{STEPS}"
    if optim.startswith("adamw"):
        counts = counts_of(last)
        assert counts["state"] == counts["schedule"] == STEPS  # the rows and the schedule go on
        assert counts["optimizer"] == {STEPS - len(skipped)}  # an update left out is not counted
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    noted = [entry for entry in history if "skipped" in entry]
    assert [entry["step"] for entry in noted] == skipped
    assert all(POISON_ROW in entry["rows"] for entry in noted)
    assert all(math.isfinite(entry["loss"]) for entry in history if "loss" in entry)


class PowerCut(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == STEPS_AN_EPOCH + 2:
            raise KeyboardInterrupt


def test_a_run_that_skips_is_resumed_to_the_same_weights(tmp_path: Path) -> None:
    whole = skipped_run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        skipped_run(tmp_path / "cut", PowerCut())
    resumed = trainer_in(tmp_path / "cut", model=poisoned(), on_nan="skip")
    with pytest.warns(UserWarning, match="is skipped"):
        resumed.train(resume_from_checkpoint=True)
    assert same(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.state.global_step == STEPS


@pytest.mark.parametrize(
    "strategies",
    [[LowBitAdamW()], [LowBitAdamW(), GradientRelease("kept8")]],
    ids=["kept", "kept8"],
)  # fmt: skip
def test_the_low_bit_optimizer_leaves_the_step_out_where_the_gradient_is(
    tmp_path: Path, strategies: list[Any]
) -> None:
    kept = Weights()
    settings = {"strategies": strategies, "learning_rate": 1e-2, "max_grad_norm": 0.0}
    trainer = trainer_in(tmp_path / "run", kept, model=poisoned(), on_nan="skip", **settings)
    with pytest.warns(UserWarning, match="is skipped"):
        trainer.train()
    skipped = trainer.health.watch.skipped_steps
    assert len(skipped) == STEPS // STEPS_AN_EPOCH
    for step in range(2, STEPS + 1):
        assert same(kept.after[step], kept.after[step - 1]) == (step in skipped), step


def test_an_optimizer_of_torch_that_is_told_found_inf_leaves_the_step_out() -> None:
    """What a GPU relies on to skip without asking the host."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.full((4,), 0.5)
    optimizer.step()
    before = weight.detach().clone()
    state = {name: value.clone() for name, value in optimizer.state[weight].items()}
    weight.grad = torch.full((4,), math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(weight.detach(), before)
    assert all(torch.equal(optimizer.state[weight][name], state[name]) for name in state)


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    watch = LossWatch("skip")
    bad, good = torch.tensor(math.nan), torch.tensor(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(1, SKIPS_IN_A_ROW):
            assert watch.after_backward(step, bad, 1.0, None)
        assert not watch.after_backward(SKIPS_IN_A_ROW, good, 1.0, None)
        for step in range(SKIPS_IN_A_ROW + 1, 2 * SKIPS_IN_A_ROW):
            watch.after_backward(step, bad, 1.0, None)
        with pytest.raises(LossError, match=f"the {SKIPS_IN_A_ROW}th step in a row"):
            watch.after_backward(2 * SKIPS_IN_A_ROW, bad, 1.0, None)


def test_what_cannot_skip_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_nan is 'sometimes'; it is one of stop, skip"):
        LossWatch("sometimes")
    with pytest.raises(ConfigError, match="on_nan='skip' cannot be used here"):
        gate_sink(object(), torch.device("cpu"))  # type: ignore[arg-type]


# ---- weights that do not move ----


def said_about_standing_still(folder: Path, **settings: Any) -> list[str]:
    model = model_of().to(settings.pop("dtype", torch.float32))
    trainer = trainer_in(folder, model=model, save_strategy="no", eval_strategy="no", **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(one.message) for one in caught if "stands still" in str(one.message)]


@pytest.mark.parametrize(
    ("dtype", "rate", "remedy"),
    [
        (torch.bfloat16, 1e-5, "keep the weights in float32"),
        (torch.float32, 1e-12, "use a larger learning rate"),
    ],
)
def test_updates_that_round_to_nothing_are_said_once(
    tmp_path: Path, dtype: torch.dtype, rate: float, remedy: str
) -> None:
    said = said_about_standing_still(tmp_path, dtype=dtype, learning_rate=rate, num_train_epochs=9)
    assert len(said) == 1
    assert remedy in said[0]
    assert str(dtype).removeprefix("torch.") in said[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 2e-5},
        {"learning_rate": 1e-2, "optim": "sgd"},
        {"learning_rate": 2e-5, "strategies": [LowBitAdamW()]},
        {"learning_rate": 1e-3, "dtype": torch.bfloat16},
        # A long warm-up begins with steps of next to nothing, on purpose.
        {"learning_rate": 2e-5, "warmup_steps": 10**9},
    ],
    ids=["fp32", "sgd", "masters", "bf16-large-steps", "warm-up"],
)
def test_a_run_that_moves_is_left_in_peace(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert said_about_standing_still(tmp_path, num_train_epochs=9, **settings) == []


# ---- a GPU that is gone ----

GONE = (
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA driver error: unknown error",
)
STAYS = (
    "CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported at some "
    "other API call.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "CUDA out of memory. Tried to allocate 2.00 MiB",
    "CUDA error: no kernel image is available for execution on the device",
    "mat1 and mat2 shapes cannot be multiplied",
    "Expected all tensors to be on the same device, cuda:0 and cpu",
)


def test_a_lost_gpu_is_told_from_every_other_failure() -> None:
    assert all(is_device_lost(RuntimeError(text)) for text in GONE)
    assert not any(is_device_lost(RuntimeError(text)) for text in STAYS)


class LoseGpu(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError(GONE[0])


def test_a_lost_gpu_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", LoseGpu())
    with pytest.raises(DeviceLostError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "the GPU no longer answers, after step 3: CUDA error: unspecified launch failure; "
        f"the last good checkpoint is {tmp_path / 'run' / 'checkpoint-3'}"
    )


def test_the_command_ends_with_1_and_says_how_to_go_on(
    tmp_path: Path,
    by_plan: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import memfit
    from memfit import api

    real = memfit.finetune
    monkeypatch.setattr(api, "finetune", lambda *a, **k: real(*a, **k, callbacks=[LoseGpu()]))
    out = tmp_path / "my out"
    capsys.readouterr()
    assert run([*by_plan, "--save-steps", "2", "--eval-strategy", "steps", "--eval-steps", "2",
                "--quiet", "--output-dir", str(out)]) == 1  # fmt: skip
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "memfit: the GPU no longer answers, after step 3: CUDA error: unspecified launch failure; "
        f"the last good checkpoint is {out / 'checkpoints' / 'checkpoint-2'}; "
        f"go on with: memfit train --resume --output-dir '{out}'"
    ]


# ---- fp16: an overflow of scaled gradients is nothing unusual ----


class Loud(BertForSequenceClassification):
    """Its gradient is so large that the loss scale a run begins with overflows."""

    factor = 2.0**10

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, labels=labels, **more)
        if self.training:
            output.loss = output.loss * self.factor
        return output


def loud(factor: float = 2.0**10) -> Loud:
    plain = model_of(dropout=0.0)
    model = Loud(plain.config)
    model.load_state_dict(plain.state_dict())
    model.factor = factor
    return model


FP16 = LowBitAdamW(dtype="float16")
FP16_SINKS = {
    "kept": [FP16],
    "kept8": [FP16, GradientRelease("kept8")],
    "host": [FP16, GradientRelease("host")],
}


def loud_run(folder: Path, sink: str, *callbacks: TrainerCallback, **settings: Any) -> Logged:
    """Twelve epochs of an fp16 run whose first steps overflow, however gradients are kept."""
    defaults = {"num_train_epochs": 12, "max_grad_norm": 1.0, "eval_strategy": "no"}
    return trainer_in(
        folder, *callbacks, model=loud(), strategies=FP16_SINKS[sink], **{**defaults, **settings}
    )


@pytest.mark.parametrize("sink", FP16_SINKS)
def test_fp16_steps_that_overflow_are_left_out_and_the_run_learns(
    tmp_path: Path, sink: str
) -> None:
    trainer = loud_run(tmp_path / "run", sink, kept := Weights(), save_strategy="no")
    kept.after[0] = model_of(dropout=0.0).half().state_dict()
    trainer.train()
    scale = trainer.setup.sink.loss_scale
    skipped = int(scale.skipped_steps)
    assert skipped >= 3
    assert float(scale.value) == 2.0**14 / 2**skipped
    stood = [n for n in range(1, len(kept.after)) if same(kept.after[n], kept.after[n - 1])]
    assert stood[:3] == [1, 2, 3]
    assert len(stood) == skipped
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_the_scale_that_was_found_outlives_the_run(tmp_path: Path) -> None:
    whole = loud_run(tmp_path / "whole", "kept", num_train_epochs=3)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        loud_run(tmp_path / "cut", "kept", PowerCut(), num_train_epochs=3).train()
    resumed = loud_run(tmp_path / "cut", "kept", num_train_epochs=3)
    resumed.train(resume_from_checkpoint=True)
    mine, theirs = (t.setup.sink.loss_scale.state_dict() for t in (resumed, whole))
    assert mine == theirs
    assert int(mine["skipped_steps"]) >= 3
    assert same(resumed.model.state_dict(), whole.model.state_dict())


def test_a_logged_overflow_leaves_a_state_that_is_json(tmp_path: Path) -> None:
    trainer = loud_run(tmp_path / "run", "kept", num_train_epochs=2)
    trainer.train()
    last = tmp_path / "run" / f"checkpoint-{2 * STEPS_AN_EPOCH}"

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is not JSON")

    text = (last / "trainer_state.json").read_text()
    logged = [e for e in json.loads(text, parse_constant=refuse)["log_history"] if "loss" in e]
    overflowed = int(trainer.setup.sink.loss_scale.skipped_steps)
    assert sum("grad_norm" not in entry for entry in logged) == overflowed >= 3


@pytest.mark.parametrize("sink", ["kept", "kept8"])
def test_an_overflow_that_no_smaller_scale_cures_ends_the_run(tmp_path: Path, sink: str) -> None:
    settings = {"num_train_epochs": 12, "save_strategy": "no"}
    trainer = loud_run(tmp_path / "run", sink, **settings)
    trainer.model.factor = 2.0**40
    with pytest.raises(LossError, match=r"the gradient is (inf|nan) in step 15 \(rows "):
        trainer.train()
    assert float(trainer.setup.sink.loss_scale.value) == 1.0


def test_an_overflow_is_skipped_by_accelerates_scaler_and_the_run_learns(tmp_path: Path) -> None:
    """fp16 computation over fp32 weights, as the Trainer's own fp16 has it on a card."""

    class Scaled(Logged):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

        def compute_loss_context_manager(self) -> Any:
            return torch.autocast("cpu", torch.float16)

    trainer = trainer_in(
        tmp_path / "run", kept := Weights(), trainer_class=Scaled, model=loud(),
        num_train_epochs=12, eval_strategy="no", save_strategy="no",
    )  # fmt: skip
    trainer.train()
    scaler = trainer.accelerator.scaler
    assert scaler.get_scale() < 2.0**18
    assert same(kept.after[2], model_of(dropout=0.0).state_dict())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
