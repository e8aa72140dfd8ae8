"""On a GPU: a loss that is not finite is found without waiting for it, or skipped where it is."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from small_run import STEPS, STEPS_AN_EPOCH, counts_of, model_of, texts, trainer_in

from memfit.errors import DeviceLostError, LossError
from memfit.strategies import LowBitAdamW
from memfit.training.checkpoints import problem_with
from memfit.training.health import LossWatch

POISON_ROW = 20
POISON = sum(texts()[POISON_ROW]["input_ids"])


class Poisoned(BertForSequenceClassification):
    """Its loss is not a number whenever one certain row is in the batch; no host is asked."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any
    ) -> Any:
        output = super().forward(input_ids, attention_mask, labels=labels, **more)
        if self.training:
            bad = (input_ids.sum(dim=1) == POISON).any()
            # Not a choice of two losses: the one not taken would pass a NaN on to the gradient.
            output.loss = output.loss * torch.where(bad, math.nan, 1.0)
        return output


def poisoned() -> Poisoned:
    plain = model_of()
    model = Poisoned(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


def test_the_run_stops_and_no_checkpoint_holds_a_broken_weight(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", model=poisoned(), use_cpu=False, bf16=True)
    with pytest.raises(LossError, match=rf"loss is nan in step \d+ \(rows .*\b{POISON_ROW}\b"):
        trainer.train()
    for checkpoint in (tmp_path / "run").iterdir():
        assert problem_with(checkpoint) == ""
        weights = BertForSequenceClassification.from_pretrained(checkpoint).state_dict()
        assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_without_saving_it_is_found_a_step_or_two_later(tmp_path: Path) -> None:
    settings = {"save_strategy": "no", "eval_strategy": "no", "logging_steps": 1000}
    trainer = trainer_in(tmp_path / "run", model=poisoned(), use_cpu=False, **settings)
    with pytest.raises(LossError, match=r"loss is nan in step (\d+) ") as caught:
        trainer.train()
    step = int(str(caught.value).split("in step ")[1].split()[0])
    assert step - 1 <= trainer.state.global_step <= step + STEPS_AN_EPOCH


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_look_never_waits_for_the_gpu() -> None:
    watch, loss = LossWatch(), torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 200):
            watch.after_backward(step, loss, loss * 2, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    watch.settle()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_skipped_step_leaves_weights_and_optimizer_alone(tmp_path: Path, optim: str) -> None:
    trainer = trainer_in(
        tmp_path / "run", model=poisoned(), use_cpu=False, on_nan="skip", optim=optim
    )
    with pytest.warns(UserWarning, match="is skipped"):
        trainer.train()
    skipped = trainer.health.watch.skipped_steps
    assert len(skipped) == STEPS // STEPS_AN_EPOCH
    counts = counts_of(tmp_path / "run" / f"checkpoint-{STEPS}")
    assert counts["state"] == counts["schedule"] == STEPS
    assert counts["optimizer"] == {STEPS - len(skipped)}
    weights = trainer.model.state_dict().values()
    assert all(bool(torch.isfinite(value).all()) for value in weights)


def test_the_low_bit_optimizer_skips_by_its_gate(tmp_path: Path) -> None:
    settings = {"strategies": [LowBitAdamW()], "use_cpu": False, "on_nan": "skip"}
    trainer = trainer_in(tmp_path / "run", model=poisoned(), **settings)
    with pytest.warns(UserWarning, match="is skipped"):
        trainer.train()
    assert len(trainer.health.watch.skipped_steps) == STEPS // STEPS_AN_EPOCH
    weights = trainer.model.state_dict().values()
    assert all(bool(torch.isfinite(value).all()) for value in weights)


def lose_the_gpu(folder: str) -> None:
    """A kernel that asserts: after it nothing on the GPU works any more."""
    from transformers import TrainerCallback

    class Assert(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):  # noqa: ARG002
            if state.global_step == 3:
                torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")].sum().item()

    trainer = trainer_in(Path(folder), Assert(), use_cpu=False)
    try:
        trainer.train()
    except DeviceLostError as error:
        Path(folder, "said.txt").write_text(str(error))


def test_a_gpu_that_no_longer_answers_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(
        target=lose_the_gpu, args=(str(tmp_path),)
    )
    process.start()
    process.join(300)
    said = (tmp_path / "said.txt").read_text()
    assert said.startswith("the GPU no longer answers, after step 3: CUDA error: device-side asse")
    assert said.endswith(f"the last good checkpoint is {tmp_path / 'checkpoint-3'}")
    assert problem_with(tmp_path / "checkpoint-3") == ""
