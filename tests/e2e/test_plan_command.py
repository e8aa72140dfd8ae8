"""A plan made, edited, trained by and resumed, with the commands a person types."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import memfit
from memfit.cli import run
from memfit.planner.plan import Plan

pytestmark = pytest.mark.usefixtures("undrawn")

PRAISE, BLAME = "服務人員都很親切", "房間很髒，空調太吵，再也不會來了"


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    # All of one length: any two steps meet the largest micro-batch.
    rows = [f"{i % 2},{(BLAME, 2 * PRAISE)[i % 2]}{chr(0x4E00 + i)}" for i in range(80)]
    path.write_text("label,review\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def common(tiny_model_dir: Path) -> dict[str, Any]:
    return {"model": tiny_model_dir, "max_length": 32, "batch_size": 16, "budget": "64MB"}


@pytest.fixture(scope="module")
def plan_file(
    reviews: Path, common: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    planning = memfit.plan(reviews, **common)
    target = tmp_path_factory.mktemp("plan") / "plan.toml"
    planning.chosen.write(target)
    return target


def summary_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return loaded


def test_an_edited_plan_is_obeyed_and_kept_beside_the_result(
    reviews: Path, tiny_model_dir: Path, plan_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    edited = tmp_path / "edited.toml"
    text = plan_file.read_text(encoding="utf-8")
    limits, strategies = text.index("[micro_batching]"), text.index("[strategies.")
    text = f"{text[:limits]}[micro_batching]\nmax_tokens = 64\n\n{text[strategies:]}"
    text += '\n[strategies.checkpointing]\npart = "layer"\n'
    edited.write_text(text, encoding="utf-8")
    output = tmp_path / "out"
    words = ["train", str(reviews), "--model", str(tiny_model_dir), "--max-length", "32",
             "--batch-size", "16", "--max-steps", "2", "--output-dir", str(output)]  # fmt: skip
    assert run([*words, "--budget", "64MB", "--plan", str(edited)]) == 0
    assert "at most 64 tokens on the device at once" in capsys.readouterr().err
    kept = Plan.read(output / "plan.toml")
    assert {one.name for one in kept.strategies} == {"packing", "checkpointing"}
    assert kept.micro_batching.max_tokens == 64
    found = summary_of(output)
    assert found["training"]["effective_batch"] == 16
    assert found["plan"]["strategies"] == {"packing": {}, "checkpointing": {}}
    assert found["plan"]["step_seconds"] > 0
    assert found["plan"]["device_peak_bytes"] == found["memory"]["predicted"]["device_bytes"]
    # On a CPU the batch, before it is cut, lies in the same memory.
    peak = found["plan"]["device_peak_bytes"]
    assert found["memory"]["measured"]["device_bytes"] == pytest.approx(peak, rel=0.03)


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_loaded(
    reviews: Path, tiny_model_dir: Path, plan_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code = run(
        ["train", str(reviews), "--model", str(tiny_model_dir), "--max-length", "32",
         "--batch-size", "16", "--output-dir", str(tmp_path / "out"), "--budget", "300KB",
         "--plan", str(plan_file)]
    )  # fmt: skip
    assert code == 3
    assert "are missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args
        if state.global_step == 2:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_a_resumed_run_goes_on_by_the_plan_it_was_begun_with(
    reviews: Path, common: dict[str, Any], plan_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        memfit.finetune(
            reviews, **common, output_dir=output, max_steps=4, quiet=True, callbacks=[Stop()],
            plan=Plan.read(plan_file),
        )  # fmt: skip
    begun = tomllib.loads((output / "plan.toml").read_text(encoding="utf-8"))
    result = memfit.finetune(output_dir=output, resume=True, quiet=True)
    assert result.summary.training["steps"] == 4
    again = tomllib.loads((output / "plan.toml").read_text(encoding="utf-8"))
    assert again["strategies"] == begun["strategies"]
    assert again["micro_batching"] == begun["micro_batching"]
