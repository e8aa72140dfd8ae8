"""What a run does around the training: says its budget, stops on Ctrl-C, resumes what it began."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, TrainerControl, TrainingArguments

from memfit.api import finetune
from memfit.config import RunConfig
from memfit.engine.micro_batches import MicroBatching
from memfit.errors import OutputError, RunStoppedError, TraceError
from memfit.memory.available import MemoryReading
from memfit.memory.components import Component
from memfit.planner import search
from memfit.planner import task as planned_task
from memfit.planner.plan import Plan, digest_of
from memfit.planner.task import Task
from memfit.records.results import RunFolder
from memfit.run import announcements
from memfit.run.callbacks import MeasureOneStep, StopAfterStep
from memfit.run.choose_plan import PlanSource, choose_plan
from memfit.run.prepare import prepare
from memfit.run.resume import (
    resume_command,
    resumed_config,
    stored_options,
    with_absolute_paths,
)
from memfit.strategies import Checkpointing, FullySharded, Packing
from memfit.units import DISPLAY_HEADROOM_BYTES, GIB, parse_budget
from sentences import FEW_REVIEWS
from traced_plans import Candidate

CPU = torch.device("cpu")


def test_the_budget_is_said_in_both_units_and_cut_to_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    workload = Task(config=BertConfig(), lengths=(8,), args=arguments)
    now = MemoryReading(total_bytes=8 * GIB, free_bytes=6 * GIB, own_bytes=0)
    monkeypatch.setattr(planned_task, "memory_of", lambda _: now)

    def said(budget: str) -> tuple[int, str]:
        task = workload.placed(parse_budget(budget), CPU)
        return task.budget_bytes, announcements.budget_sentence(task)

    assert said("1GiB") == (GIB, "1.07 GB (1.00 GiB)")
    assert said("50%") == (4 * GIB, "4.29 GB (4.00 GiB), 50% of the device")
    assert said("auto") == (6 * GIB - DISPLAY_HEADROOM_BYTES, "6.17 GB (5.75 GiB), auto")
    all_bytes, sentence = said("7GiB")
    assert 5.9 * GIB < all_bytes < 6 * GIB
    assert sentence.endswith(": all that is free, less than the 7.52 GB (7.00 GiB) asked for")


def test_the_first_ctrl_c_saves_and_the_second_stops_at_once() -> None:
    said: list[str] = []
    stop, control = StopAfterStep(said.append), TrainerControl()
    arguments: Any = SimpleNamespace(eval_strategy="epoch", save_strategy="epoch")
    state: Any = SimpleNamespace(epoch=0.5)
    stop.on_step_end(arguments, state, control)
    stop.on_save()
    assert not control.should_save
    stop.ask()
    assert "press Ctrl-C again" in said[0]
    stop.on_step_end(arguments, state, control)
    assert control.should_save
    with pytest.raises(KeyboardInterrupt):
        stop.on_save()
    with pytest.raises(KeyboardInterrupt):
        stop.ask()


@pytest.mark.parametrize(
    ("steps_an_epoch", "max_steps", "measured"),
    [(5, 10, 2), (2, 10, 3), (2, 2, 2), (1, 4, 2)],
)
def test_the_first_full_step_from_the_second_on_is_measured(
    steps_an_epoch: int, max_steps: int, measured: int
) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    probe = MeasureOneStep()
    arguments: Any = SimpleNamespace(torch_compile=False, gradient_accumulation_steps=2)
    parts: Any = {"model": model, "optimizer": optimizer}
    batches = range(2 * steps_an_epoch - 1)
    for step in range(1, max_steps + 1):
        assert (probe.peak(CPU) is not None) == (step > measured)
        state: Any = SimpleNamespace(global_step=step - 1, max_steps=max_steps)
        probe.on_step_begin(arguments, state, state, train_dataloader=batches, **parts)
        model(torch.ones(16, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.on_step_end()
    assert probe.step == measured
    peak = probe.peak(CPU)
    assert peak is not None
    weights_bytes = (8 * 4 + 4) * 4
    assert peak.components[Component.WEIGHTS] == weights_bytes
    assert peak.components[Component.OPTIMIZER] == weights_bytes  # the momentum


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    config = RunConfig.build(data="a.csv", model="bert", output_dir=folder, budget="2GB", epochs=2)
    (folder / "run.toml").write_text(config.to_toml())
    return folder


def test_a_resumed_run_may_get_another_budget_and_nothing_else(run_folder: Path) -> None:
    same = resumed_config(str(run_folder), None, {})
    assert same == RunConfig.from_toml(run_folder / "run.toml")
    assert resumed_config(str(run_folder), None, {"budget": "3GB"}).budget == "3GB"
    assert resumed_config(str(run_folder), None, {"gpus": 4}).gpus == "4"
    assert resumed_config(str(run_folder), None, {"data": "a.csv", "epochs": 2}) == same
    with pytest.raises(OutputError, match=r"data\.path: b\.csv, not a\.csv"):
        resumed_config(str(run_folder), None, {"data": "b.csv"})
    with pytest.raises(OutputError, match="there is no run to resume"):
        resumed_config(str(run_folder / "deeper"), None, {})
    with pytest.raises(OutputError, match="name the run to resume"):
        finetune(resume=True)


def test_code_of_a_model_is_permitted_again_for_a_resumed_run(run_folder: Path) -> None:
    """The folder may come from somebody else, and its run.toml with it."""
    stored = run_folder / "run.toml"
    config = RunConfig.from_toml(stored)
    trusting = replace(config, model=replace(config.model, trust_remote_code=True))
    stored.write_text(trusting.to_toml())
    for named in (None, stored):
        with pytest.raises(OutputError, match=r"code that comes with its model, bert.*--trust-rem"):
            resumed_config(str(run_folder), named, {})
    assert resumed_config(str(run_folder), None, {"trust_remote_code": True}) == trusting
    own = run_folder.parent / "own.toml"
    own.write_text(trusting.to_toml())
    assert resumed_config(str(run_folder), own, {}) == trusting
    assert resume_command(run_folder).endswith(" --trust-remote-code")
    assert stored_options({"model": {"model": "bert", "trust_remote_code": True}})[0] == {
        "model": "bert"
    }


def test_a_resumed_run_may_leave_out_the_plan_that_was_made_for_it(run_folder: Path) -> None:
    asked = run_folder.parent / "asked.toml"
    stored = RunConfig.from_toml(run_folder / "run.toml")
    asked.write_text(stored.to_toml())
    named = replace(stored, named_plan={"settings": "a", "strategies": {"packing": {}}})
    (run_folder / "run.toml").write_text(named.to_toml())
    assert resumed_config(str(run_folder), asked, {}) == stored
    assert resumed_config(str(run_folder), None, {}) == named


def test_paths_are_stored_in_full_and_hub_ids_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").touch()
    config = with_absolute_paths(RunConfig.build(data="a.csv", model="hfl/rbt3", output_dir="out"))
    assert config.data.path == str(tmp_path / "a.csv")
    assert config.model.model == "hfl/rbt3"
    assert config.output_dir == str(tmp_path / "out")


@pytest.fixture
def untraceable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise TraceError("the shape of aten.nonzero depends on values")

    monkeypatch.setattr(search, "plan_for", refuse)


@pytest.mark.usefixtures("untraceable")
@pytest.mark.usefixtures("undrawn")
def test_a_model_that_cannot_be_traced_trains_unless_a_budget_was_promised(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(FEW_REVIEWS, encoding="utf-8")
    options: dict[str, Any] = {"model": tiny_model_dir, "max_length": 16, "max_steps": 1}
    result = finetune(table, output_dir=tmp_path / "auto", **options)
    assert "memory cannot be predicted: the shape of aten.nonzero" in capsys.readouterr().err
    assert result.summary.training["steps"] == 1
    with pytest.raises(TraceError):
        finetune(table, output_dir=tmp_path / "promised", budget="1GB", **options)
    assert not (tmp_path / "promised").exists()


def test_running_out_of_memory_outside_a_step_is_told_and_no_bug(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    table = tmp_path / "a.csv"
    table.write_text(FEW_REVIEWS, encoding="utf-8")
    monkeypatch.setattr(torch.optim.AdamW, "step", no_memory)
    with pytest.raises(RunStoppedError, match=r"beside step 1.*Tried to allocate 20.00 MiB"):
        finetune(
            table, output_dir=tmp_path / "run", model=tiny_model_dir, max_length=16, max_steps=2,
            exact=True,
        )  # fmt: skip


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_rerun_by_the_plan_its_settings_name_whatever_would_be_planned_now(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(FEW_REVIEWS, encoding="utf-8")
    options: dict[str, Any] = {
        "model": tiny_model_dir, "max_length": 16, "max_steps": 2, "budget": "1GB", "exact": True,
    }  # fmt: skip
    task = prepare(RunConfig.build(data=table, **options), tmp_path).task
    slower = Candidate((Packing(), Checkpointing()), MicroBatching(max_tokens=64))
    given = Plan(
        strategies=slower.strategies, micro_batching=slower.micro_batching, digest=digest_of(task)
    )
    first = finetune(table, output_dir=tmp_path / "first", plan=given, **options)
    settings = tmp_path / "first" / "run.toml"
    assert tomllib.loads(settings.read_text(encoding="utf-8"))["plan"]["strategies"] == {
        "packing": {},
        "checkpointing": {},
    }
    again = finetune(config=settings, output_dir=tmp_path / "again")
    assert again.summary.plan["strategies"] == first.summary.plan["strategies"]
    assert again.summary.plan["micro_batching"]["max_tokens"] == 64
    assert "planned anew" not in capsys.readouterr().err
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert weights[0] == weights[1]
    named = RunConfig.from_toml(tmp_path / "again" / "run.toml").named_plan
    assert named == RunConfig.from_toml(settings).named_plan

    said: list[str] = []

    def chosen(**options: Any) -> Any:
        config = RunConfig.build(settings, **options)
        task = prepare(config.asked, tmp_path / "new").task
        folder = RunFolder(tmp_path / "new")
        source = PlanSource(config=config.asked, folder=folder, named=config.named_plan)
        made = choose_plan(source, task)
        said.extend(made.notes)
        assert made.plan is not None
        return Candidate(made.plan.strategies, made.plan.micro_batching)

    assert chosen(batch_size=4) != slower
    assert "planned anew, not by [plan] of the settings: other settings" in said.pop()
    with table.open("a", encoding="utf-8") as file:
        file.write("1,非常親切\n" * 3)
    assert chosen() != slower
    assert "of the settings: rows: 21 -> 23" in said.pop()


def test_a_run_of_several_ranks_resumes_on_one_with_nothing_divided(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    table = tmp_path / "a.csv"
    table.write_text("label,review\n" + "1,親切\n0,不親切\n" * 12, encoding="utf-8")
    config = RunConfig.build(data=table, model=tiny_model_dir, budget="1GB", max_length=16)
    task = prepare(config, tmp_path).task
    folder = RunFolder(tmp_path / "out")
    folder.path.mkdir()
    digest = digest_of(task)
    begun = Candidate((Packing(), FullySharded()), MicroBatching(max_tokens=64))
    Plan(strategies=begun.strategies, micro_batching=begun.micro_batching, digest=digest).write(
        folder.plan
    )
    source = PlanSource(config=config, folder=folder, checkpoint=folder.path / "any")
    made = choose_plan(source, task).plan
    assert made is not None
    assert (made.strategies, made.micro_batching) == ((Packing(),), MicroBatching(max_tokens=64))
