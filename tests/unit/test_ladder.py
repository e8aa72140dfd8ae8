"""The rungs of the ladder, the rows they are measured on, and what is kept between two climbs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.config import RunConfig
from memfit.config.training_fields import HEAD_LEARNING_RATE
from memfit.errors import BudgetError, ConfigError, InputError, ModelError, OutputError
from memfit.ladders import climb
from memfit.ladders.run_rung import WARM_STEPS, rows_in_order, score, trainer_of
from memfit.ladders.rungs import (
    DOES_NOT_FIT,
    FAILED,
    FIDELITIES,
    NAMES,
    OK,
    PLAN,
    Rung,
    classic_rungs,
    plan_rungs,
)
from memfit.run.announcements import voice
from memfit.run.prepare import prepare
from memfit.strategies import Fidelity
from memfit.waiting import telling
from sentences import FEW_REVIEWS


def asked_run(**options: Any) -> RunConfig:
    return RunConfig.build(**{"data": "some/reviews", "model": "some/model", **options})


def by_name(config: RunConfig) -> dict[str, Rung]:
    return {rung.name: rung for rung in classic_rungs(config)}


def test_a_rung_of_a_frozen_encoder_trains_as_memfit_train_does(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The head learns at its own rate, in what is planned for and in what is trained."""
    table = tmp_path / "a.csv"
    table.write_text(FEW_REVIEWS, encoding="utf-8")
    config = asked_run(data=table, model=tiny_model_dir, freeze="encoder", max_length=16)
    plan = Rung(name="plan-1GB", kind=PLAN, budget="1GB")
    for rung in (Rung(name="baseline"), plan):
        run = rung.applied_to(config)
        prepared = prepare(run, tmp_path)
        assert prepared.arguments.learning_rate == HEAD_LEARNING_RATE
        assert trainer_of(run, prepared).args.learning_rate == HEAD_LEARNING_RATE
    assert prepared.task.budget_bytes == 10**9  # the rung's, not the run's


def test_a_classic_rung_is_scored_by_its_whole_training(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(FEW_REVIEWS, encoding="utf-8")
    config = asked_run(data=table, model=tiny_model_dir, max_length=16, epochs=2)
    run = by_name(config)["shorter"].applied_to(config)
    found = score(run, prepare(run, tmp_path), None, 7)
    assert (found["status"], found["metric"], found["epochs"]) == (OK, "f1", 2)
    assert 0 <= found["value"] == found["metrics"]["f1"] <= 1


# ---- the classic rungs ----


def test_each_rung_is_on_top_of_the_one_before() -> None:
    rungs = classic_rungs(asked_run(batch_size=8, gradient_accumulation_steps=4))
    assert [rung.name for rung in rungs] == [name for name in NAMES if name != PLAN]
    sizes = [
        (r.training["per_device_train_batch_size"], r.training["gradient_accumulation_steps"])
        for r in rungs
    ]
    assert sizes == [(32, 1)] + [(1, 32)] * 6  # the effective batch is never another
    assert [bool(r.training.get("gradient_checkpointing")) for r in rungs] == [False] * 2 + [
        True
    ] * 5
    assert [r.training.get("optim") for r in rungs] == [None] * 3 + ["adafactor"] * 4
    assert [r.freeze for r in rungs] == [None] * 4 + ["encoder"] * 3
    assert [r.training.get("learning_rate") for r in rungs[4:]] == [2e-5, 1e-3, 1e-3]
    assert [r.max_length for r in rungs] == [None] * 6 + [32]
    assert [r.fidelity for r in rungs] == [
        "exact", "exact", "exact", "optimizer", "capacity", "capacity", "data",
    ]  # fmt: skip


def test_the_fidelities_are_those_of_the_strategies_in_their_order() -> None:
    assert [str(one) for one in Fidelity] == list(FIDELITIES)


def test_the_frozen_rung_keeps_the_users_rate_and_the_next_one_tunes_the_head() -> None:
    rungs = by_name(asked_run(learning_rate=5e-5))
    assert rungs["frozen"].training["learning_rate"] == 5e-5
    assert rungs["tuned"].training["learning_rate"] == HEAD_LEARNING_RATE
    assert "tuned" not in by_name(asked_run(learning_rate=2e-3))


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({"gradient_checkpointing": True}, {"checkpointing"}),
        ({"optim": "adafactor"}, {"adafactor"}),
        ({"freeze": "encoder"}, {"frozen", "tuned"}),
        ({"lora": 8}, {"frozen", "tuned"}),
        ({"batch_size": 1}, {"accumulation"}),
        ({"max_length": 8}, {"shorter"}),
    ],
)
def test_a_rung_that_would_change_nothing_is_left_out(
    options: dict[str, Any], left_out: set[str]
) -> None:
    assert set(by_name(asked_run(**options))) == {*NAMES} - left_out - {PLAN}


def test_a_rung_changes_the_run_it_is_applied_to_and_survives_json() -> None:
    config = asked_run(max_length=64, weight_decay=0.1)
    rung = by_name(config)["shorter"]
    again = Rung.from_json(json.loads(json.dumps(dataclasses.asdict(rung))))
    assert again == rung
    run = again.applied_to(config)
    assert (run.data.max_length, run.model.freeze) == (16, "encoder")
    assert run.training["weight_decay"] == 0.1
    assert config.model.freeze is None


# ---- memfit's own plans ----


def test_plans_are_made_for_what_is_free_a_small_card_and_half_of_the_baseline() -> None:
    made = plan_rungs([], baseline_bytes=10_000_000_000, card_bytes=24 * 2**30)
    assert [(one.name, one.budget) for one in made] == [
        ("plan-auto", "auto"),
        ("plan-4GB", "4GB"),
        ("plan-half", "5000000000B"),
    ]
    on_cpu = plan_rungs([], baseline_bytes=1_000_000, card_bytes=None)
    assert [one.name for one in on_cpu] == ["plan-auto", "plan-half"]
    unknown = plan_rungs([], baseline_bytes=None, card_bytes=None)
    assert [one.name for one in unknown] == ["plan-auto"]
    given = plan_rungs(["2GB", "2GB"], baseline_bytes=1, card_bytes=None)
    assert [one.budget for one in given] == ["2GB"]
    (bare,) = plan_rungs([str(2**22)], baseline_bytes=None, card_bytes=None)
    assert (bare.budget, bare.words["budget"]) == ("4194304", "4.0 MiB")


# ---- rows ----


def test_the_second_step_learns_from_the_longest_rows_and_the_rest_is_drawn() -> None:
    lengths = [5, 9, 3, 9, 1, 7, 8, 2, 4, 6]
    order = rows_in_order(lengths, effective=3, steps=2, seed=0)
    assert len(order) == (WARM_STEPS + 2) * 3
    assert [lengths[row] for row in order[3:6]] == [9, 9, 8]
    drawn = order[:3] + order[6:]
    assert sorted(drawn[:10]) == list(range(10))  # none twice before all were drawn
    assert order == rows_in_order(lengths, effective=3, steps=2, seed=0)
    assert order != rows_in_order(lengths, effective=3, steps=2, seed=1)


def test_a_table_smaller_than_a_batch_is_gone_through_again() -> None:
    order = rows_in_order([4, 6], effective=5, steps=1, seed=0)
    assert len(order) == (WARM_STEPS + 1) * 5
    assert order[5:10] == [1, 0, 1, 0, 1]


# ---- what is asked for ----


def asked(**options: Any) -> climb.LadderRequest:
    return climb.LadderRequest(**options)


def test_rungs_may_be_written_with_commas_and_the_baseline_is_always_there() -> None:
    some = asked(rungs=["frozen, plan", "adafactor"])
    wanted = [one.name for one in classic_rungs(asked_run()) if some.wants(one.name)]
    assert wanted == ["baseline", "adafactor", "frozen"]
    assert some.wants(PLAN)
    assert not asked(rungs=["frozen"]).wants(PLAN)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"rungs": ["frozn"]}, ConfigError, "Did you mean 'frozen'?"),
        ({"steps": 0}, ConfigError, "--steps is 0"),
        ({"quality": True, "seeds": 0}, ConfigError, "--seeds is 0"),
        ({"plan_budgets": ["lots"]}, BudgetError, "lots"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said.replace("?", r"\?")):
        asked(**options)


def test_a_folder_with_something_else_in_it_and_a_model_that_is_not_there_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    quiet = lambda _: None  # noqa: E731
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = str(tmp_path / "model")
    config = asked_run(model=model, from_scratch=True, output_dir=str(tmp_path))
    with pytest.raises(OutputError, match="holds something else"):
        climb.climb(config, asked(), quiet)
    file = dataclasses.replace(config, output_dir=str(tmp_path / "mine.txt"))
    with pytest.raises(OutputError, match="it is a file"):
        climb.climb(file, asked(), quiet)
    with pytest.raises(ModelError):
        climb.climb(asked_run(model="./none", output_dir=str(tmp_path / "x")), asked(), quiet)
    assert not (tmp_path / "x").exists()


# ---- what is kept ----


def climber(folder: Path, config: RunConfig, **options: Any) -> climb._Climber:
    folder.mkdir(exist_ok=True)
    return climb._Climber(config, asked(**options), lambda _: None, folder)


def test_a_key_changes_with_all_that_decides_a_result_and_with_nothing_else(
    tmp_path: Path,
) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text("label,review\n1,good\n")
    config = asked_run(data=str(table))
    rung = by_name(config)["frozen"]

    def key(config: RunConfig = config, seed: int | None = None, **options: Any) -> str:
        return climber(tmp_path / "out", config, **options).key(rung, seed)

    first = key()
    assert first == key(dataclasses.replace(config, output_dir="elsewhere"))
    assert first == key(rungs=["frozen"])
    assert first != key(steps=3)
    assert first != key(seed=1) != key(seed=2)
    assert key(seed=1) == key(seed=1, steps=3)  # a whole training times no steps
    assert first != key(asked_run(data=str(table), learning_rate=1e-4))
    table.write_text("label,review\n1,good\n0,bad\n")
    assert first != key()


def interpreter(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("kill -9 $$", DOES_NOT_FIT, "where memory runs out"),
        ("echo bad luck >&2; exit 4", FAILED, "ended with code 4"),
    ],
)
def test_a_process_that_leaves_no_result_is_told_by_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, status: str, said: str
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    found = climb.run_process({"rung": "any"}, tmp_path / "rung.json")
    assert found["status"] == status
    assert said in found["why"]
    assert json.loads((tmp_path / "rung.json").read_text()) == found


def test_a_rungs_process_speaks_our_language_sees_one_card_and_logs_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = 'echo "$MEMFIT_LANG $CUDA_VISIBLE_DEVICES"; echo \'{"status": "ok"}\' > "$5"'
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    assert climb.run_process({}, tmp_path / "rung.json") == {"status": "ok"}
    assert (tmp_path / "rung.log").read_text() == "en 0\n"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    "options",
    [
        {"class_weights": "balanced"}, {"threshold": "auto"}, {"early_stopping": 2},
        {"positive_label": "1"},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_that_no_rung_uses_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    config = asked_run(output_dir=str(tmp_path / "ladder"), **options)
    with pytest.raises(ConfigError, match=f"does not use {next(iter(options))}"):
        climb.climb(config, asked(), lambda _: None)
    assert not (tmp_path / "ladder").exists()


def test_wrong_input_ends_the_ladder_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"status": FAILED, "why": "no such table", "input_is_wrong": True})
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, f"echo '{answer}' > \"$5\""))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = asked_run(
        model=str(tmp_path / "model"), from_scratch=True, output_dir=str(tmp_path / "out")
    )
    with pytest.raises(InputError, match="no such table"):
        climb.climb(config, asked(), lambda _: None)
    assert not (tmp_path / "out").exists()


def test_what_ran_and_what_does_not_fit_is_stored_and_what_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    out = tmp_path / "out"
    config = asked_run(model=str(tmp_path / "model"), from_scratch=True, output_dir=str(out))

    def climbed(answer: str) -> Any:
        monkeypatch.setattr(sys, "executable", interpreter(tmp_path, f"echo '{answer}' > \"$5\""))
        return climb.climb(config, asked(rungs=["baseline"]), lambda _: None).outcomes[0]

    assert climbed('{"status": "failed"}').status == FAILED
    timed = climbed(json.dumps({"status": OK, "steps_per_epoch": 2, "step_seconds": [1.0, 3.0]}))
    assert (timed.status, timed.epoch_seconds) == (OK, 4.0)
    assert climbed('{"status": "failed"}') == timed
    assert json.loads((out / "ladder.json").read_text())["outcomes"][0]["status"] == OK


def test_a_rung_says_what_it_does_while_its_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memfit.waiting._TICK_SECONDS", 0.01)
    monkeypatch.setattr("memfit.waiting._LINE_AFTER_SECONDS", 0.0)
    answer = json.dumps({"status": "ok", "step_seconds": [1.0]})
    script = f"sleep 0.5; echo '{answer}' > \"$5\""
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    (tmp_path / "config.json").write_text("{}")
    out = str(tmp_path / "ladder")
    config = asked_run(model=str(tmp_path), from_scratch=True, output_dir=out)
    with telling():
        climb.climb(config, asked(rungs=["baseline"], steps=7), voice(quiet=False))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("[1/1] ")
    assert said[1] == "loading libraries and timing 7 steps …"


def test_a_default_budget_that_adds_nothing_or_that_no_plan_fits_is_no_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = [
        {"components": {}, "allocated_bytes": size, "reserved_bytes": size, "device_bytes": size,
         "module": ""}
        for size in (1000, 400, 600)
    ]  # fmt: skip
    base, small, large = (json.dumps({"status": OK, "predicted": one}) for one in peaks)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def climbed(plan: str, **options: Any) -> list[str]:
        script = f"""case "$5" in *baseline*) echo '{base}';; *) echo '{plan}';; esac > "$5" """
        monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
        config = asked_run(
            model=str(tmp_path / "model"), from_scratch=True, output_dir=str(tmp_path / "out")
        )
        some = asked(rungs=["plan"], fresh=True, **options)
        return [one.rung.name for one in climb.climb(config, some, lambda _: None).outcomes]

    assert climbed(small) == ["baseline", "plan-auto"]
    assert climbed(large) == ["baseline", "plan-auto", "plan-half"]
    asked_for = ["auto", "half"]
    assert climbed(small, plan_budgets=asked_for) == ["baseline", "plan-auto", "plan-half"]
    # A default budget that no plan fits is no rung; one that was asked for is told not to fit.
    none = json.dumps({"status": DOES_NOT_FIT, "why": "nothing fits"})
    assert climbed(none) == ["baseline", "plan-auto"]
    assert climbed(none, plan_budgets=["half"]) == ["baseline", "plan-half"]


def test_a_file_in_the_current_folder_takes_no_modules_place_in_a_rungs_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memfit").mkdir()
    (tmp_path / "memfit" / "__init__.py").write_text("raise SystemExit('taken over')")
    # The process comes as far as importing torch, which takes seconds and is not what is tested.
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise SystemExit('imported by memfit')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    climb.run_process({}, tmp_path / "rung.json")
    assert (tmp_path / "rung.log").read_text() == "imported by memfit\n"
