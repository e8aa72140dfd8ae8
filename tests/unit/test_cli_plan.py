"""memfit plan: what it prints, writes and checks, and its exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from planner_fixtures import SMALL, bert, laptop, planned, task
from rich.console import Console

from memfit.cli import run
from memfit.i18n import speaking
from memfit.memory.cards import find_card
from memfit.planner.advice import Alternatives, NothingFitsError, alternatives
from memfit.planner.plan import plan_of
from memfit.planner.search import Planning
from memfit.records import results
from memfit.report import plan_json, plan_terminal
from memfit.report.plan_terminal import difference_in_words, settings_in_words
from memfit.strategies import (
    BY_NAME,
    ActivationOffload,
    Checkpointing,
    Freezing,
    GradientRelease,
    LowBitAdamW,
    Strategy,
    Truncation,
    ordered,
)


@pytest.fixture(scope="module")
def made() -> Planning:
    """A small model inside half a gigabyte, beside a plan with 8-bit gradients."""
    found = planned(SMALL, 5 * 10**8, laptop())
    assert found.search is not None
    kept8 = (*found.chosen.strategies, GradientRelease("kept8"))
    price = found.search.pricer.price(tuple(ordered(kept8)), found.chosen.micro_batching)
    return dataclasses.replace(found, candidates=(plan_of(price, found.task),))


@pytest.fixture(scope="module")
def others(made: Planning) -> Alternatives:
    """What more permission, a longer text or a smaller model would mean."""
    return alternatives(made)


def shown(view: Any, **console: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=80, highlight=False, markup=False, **console).print(view)
    return file.getvalue()


def test_the_view_has_every_part_in_eighty_columns_without_colours(
    made: Planning, others: Alternatives
) -> None:
    seconds = results.RunSeconds(training=60.0, evaluation=5.0, evaluations=3)
    text = shown(plan_terminal.plan_view(made, others, seconds, "large", planned_seconds=9.0))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    for part in ("large on", "0.50 GB (476.8 MiB)", "1 min 05 s in all", "weights", "Decisions",
                 "Other plans that fit", "What more permission would reach", "--allow lora",
                 "planned in 9.0 s: "):  # fmt: skip
        assert part in text
    words = " ".join(text.split())
    for sentence in made.chosen.sentences()[1:]:
        assert " ".join(sentence.split()) in words.replace("- ", "- ")


def test_the_view_speaks_chinese(made: Planning, others: Alternatives) -> None:
    seconds = results.RunSeconds(training=60.0, evaluation=0.0, evaluations=0)
    with speaking("zh"):
        text = shown(plan_terminal.plan_view(made, others, seconds, "large", planned_seconds=9.0))
    for part in ("预算", "各项决定", "其他放得下的方案", "更多许可能达到什么"):
        assert part in text
    assert "显存" in text
    assert "--allow lora（学得更少）" in text
    assert not re.search(r"exact|rounding|capacity|（data）|（optimizer）|\dx|因为 [^-]", text)


def test_the_memory_of_a_cpu_is_not_called_that_of_a_card(made: Planning) -> None:
    digest = dataclasses.replace(made.chosen.digest, card="cpu")
    here = dataclasses.replace(made, chosen=dataclasses.replace(made.chosen, digest=digest))
    seconds = results.RunSeconds(training=60.0, evaluation=0.0, evaluations=0)
    with speaking("zh"):
        text = shown(plan_terminal.plan_view(here, None, seconds, "large", planned_seconds=9.0))
    assert re.search(r"每步 +内存 +保真度", text)


def test_other_plans_are_told_by_what_differs(made: Planning) -> None:
    seconds = results.RunSeconds(training=1.0, evaluation=0.0, evaluations=0)
    text = shown(plan_terminal.plan_view(made, None, seconds, "large", planned_seconds=9.0))
    rows = " ".join(text.partition("Other plans that fit")[2].split())
    assert made.candidates
    chosen = settings_in_words(made.chosen)
    for plan in made.candidates:
        own = settings_in_words(plan)
        assert own != chosen
        assert difference_in_words(own, chosen) in rows


def test_a_difference_names_what_is_more_and_then_what_is_left_out() -> None:
    masters = LowBitAdamW(16).in_words()
    these = {"lowbit_adamw": masters, "checkpointing": Checkpointing(3).in_words()}
    those = {
        "lowbit_adamw": masters,
        "gradient_release": GradientRelease("host").in_words(),
    }
    said = difference_in_words(these, those)
    assert said == "3 layers recomputed, without gradients in host memory"
    with speaking("zh"):
        chinese = ActivationOffload(6).in_words()
    assert chinese == "6 层的激活放主机内存"
    assert Checkpointing(1).in_words() == "one layer recomputed"


def test_every_strategy_is_told_in_words() -> None:
    needs: dict[str, Strategy] = {"truncation": Truncation(64), "freezing": Freezing("encoder")}
    for name, kind in BY_NAME.items():
        strategy = needs[name] if name in needs else kind()
        for lang in ("en", "zh"):
            with speaking(lang):
                words = strategy.in_words()
            assert words
            assert "_" not in words, name
            assert "{" not in words


def test_a_run_takes_its_steps_and_its_evaluations(made: Planning) -> None:
    import dataclasses

    price = made.chosen.price
    assert price is not None
    price = dataclasses.replace(price, step_seconds=0.5)
    workload = dataclasses.replace(task(num_train_epochs=2, eval_strategy="epoch"), eval_rows=320)
    found = plan_json.run_seconds(workload, price)
    assert found.training == pytest.approx(2 * 219 * 0.5)  # 6,988 rows in steps of 32
    assert found.evaluations == 2
    assert found.evaluation == pytest.approx(2 * 10 * 0.5 / 3)  # ten forward passes each
    short = dataclasses.replace(task(max_steps=10), eval_rows=320)
    assert plan_json.run_seconds(short, price).total == pytest.approx(5.0)


def test_nothing_fits_shows_the_smallest_plan_against_the_budget() -> None:
    workload, card = task(bert(2, 64, 100), lengths=(16,) * 32), find_card("GTX 1050 Ti")
    with pytest.raises(NothingFitsError) as caught:
        planned(workload, 10**8, card, host_bytes_free=0)
    text = shown(plan_terminal.smallest_view(caught.value.smallest, caught.value.notes))
    assert "The smallest plan found" in text
    assert "too much" in text
    assert "are kept for what is not known of it" in " ".join(text.split())


# ---- the command; tests/e2e has it with real traces ----


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    rows = [f"{index % 2},{'親切' * (1 + index % 9)}{chr(0x4E00 + index)}" for index in range(60)]
    path.write_text("label,review\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def plan_file(
    table: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A plan by the command: its file, and its JSON."""
    import contextlib

    target = tmp_path_factory.mktemp("plans") / "plan.toml"
    words = ["plan", str(table), "--model", str(tiny_model_dir), "--max-length", "32",
             "--batch-size", "16", "--budget", "64MB", "--gpu", "cpu"]  # fmt: skip
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run([*words, "--json", "--output", str(target)]) == 0
    return target, json.loads(printed.getvalue())


def test_the_json_has_the_chosen_plan_and_the_others(plan_file: tuple[Path, Any]) -> None:
    found = plan_file[1]
    assert (found["card"], found["budget_bytes"], found["effective_batch"]) == (
        "cpu",
        64 * 10**6,
        16,
    )
    assert found["rows"] == 54
    for plan in (found["chosen"], *found["candidates"]):
        assert plan.keys() >= {
            "fidelity", "strategies", "components", "peak_allocated_bytes",
            "peak_reserved_bytes", "device_peak_bytes", "step_seconds",
        }  # fmt: skip
        assert plan["fidelity"] in ("exact", "rounding")
        assert plan["device_peak_bytes"] <= 64 * 10**6
    assert "packing" in found["chosen"]["strategies"]
    assert {one["name"] for one in found["alternatives"]["allow"]} >= {"lora", "freeze"}
    assert found["total_seconds"] == found["training_seconds"] + found["evaluation_seconds"] > 0


def test_a_plan_is_made_for_one_of_several_cards_that_are_not_here(
    table: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(table), "--model", str(tiny_model_dir), "--max-length", "32",
             "--batch-size", "8", "--gpu", "RTX 3060 12GB", "--gpus"]  # fmt: skip
    assert run([*words, "4", "--json", "--output", str(tmp_path / "plan.toml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["effective_batch"], found["steps_per_epoch"]) == (4, 32, 2)
    stored = tomllib.loads((tmp_path / "plan.toml").read_text(encoding="utf-8"))
    assert (stored["run"]["gpus"], stored["workload"]["ranks"]) == ("4", 4)
    assert "NCCL" in stored["reasons"]["ranks"]
    assert run(["plan", "--check", str(tmp_path / "plan.toml"), "--gpus", "2"]) == 0
    assert "ranks: 4 -> 2" in capsys.readouterr().out
    assert run([*words, "2"]) == 0
    assert "on each of 2 x GeForce RTX 3060 12GB" in " ".join(capsys.readouterr().out.split())


def test_the_file_is_the_plan_and_knows_its_run(plan_file: tuple[Path, Any], table: Path) -> None:
    target, found = plan_file
    stored = tomllib.loads(target.read_text(encoding="utf-8"))
    assert stored["strategies"] == found["chosen"]["strategies"]
    assert stored["predicted"]["device_peak_bytes"] == found["chosen"]["device_peak_bytes"]
    assert stored["run"]["data"]["path"] == str(table)
    assert stored["run"]["gpu"] == "cpu"


def test_a_plan_is_checked_by_its_file_alone(
    plan_file: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    target, found = plan_file
    assert run(["plan", "--check", str(target)]) == 0
    assert "plan.toml fits" in capsys.readouterr().out
    tight = found["chosen"]["device_peak_bytes"] - 4096
    assert run(["plan", "--check", str(target), "--budget", f"{tight}B", "--json"]) == 3
    printed = capsys.readouterr()
    assert "4.0 KiB are missing" in printed.err
    said = json.loads(printed.out)
    assert (said["fits"], said["missing_bytes"]) == (False, 4096)
    assert said["changed"] == [f"budget_bytes: 64000000 -> {tight}"]


def test_nothing_fits_is_exit_code_3_with_what_is_missing(
    table: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["plan", str(table), "--model", str(tiny_model_dir), "--max-length", "32",
                "--gpu", "cpu", "--budget", "200KB", "--json"])  # fmt: skip
    assert code == 3
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert said["chosen"] is None
    assert said["missing_bytes"] == said["smallest"]["device_peak_bytes"] - 200_000 > 0
    assert "nothing fits" in printed.err
    assert "budget" in {one["kind"] for one in said["helps"]}
    for one in said["helps"]:  # nothing is offered that would not help
        assert (one["device_peak_bytes"] <= 200_000) == (one["kind"] != "budget")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--allow", "lorra"], "Did you mean 'lora'?"),
        (["--exact", "--allow", "lora"], "exclude each other"),
        (["--gpu", "RTX 9999"], "no card 'RTX 9999' is known"),
        (["--gpu", "RX 7900"], "memfit plans for NVIDIA cards and CPUs"),
        (["--budget", "4"], "did you mean 4GB?"),
        (["--output", "nowhere/plan.toml"], "cannot write the plan"),
        (["--check", "nowhere.toml"], "cannot read"),
        (["--max-length", "500"], "beyond the 64 positions"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    words: list[str], sentence: str, table: Path, tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(["plan", str(table), "--model", str(tiny_model_dir), *words]) == 2
    assert sentence in capsys.readouterr().err
