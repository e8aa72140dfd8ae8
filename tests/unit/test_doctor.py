"""`memfit doctor`: what it finds, what it advises, what it says a card can train."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from rich.cells import cell_len
from rich.console import Console
from transformers import GPT2Config, GPT2ForSequenceClassification, TrainingArguments

from memfit.cli import run
from memfit.cli.doctor import _trains
from memfit.doctor import environment
from memfit.doctor.diagnosis import (
    Diagnosis,
    Finding,
    about_card,
    findings,
    lacks_kernels,
    torch_command,
)
from memfit.doctor.environment import OPTIONAL, Card, Environment, Package, TorchBuild, look_around
from memfit.doctor.reach import Reach, Readiness, model_config, reaches, readiness, well_known
from memfit.errors import ConfigError, TraceError
from memfit.i18n import Message, shown, speaking, t
from memfit.memory.cards import CardPlace, find_card
from memfit.memory.nvml import Driver, DriverCard, driver
from memfit.planner.advice import NothingFitsError
from memfit.planner.task import budget_bytes
from memfit.strategies import ORDER, Packing, Setup
from memfit.strategies.packing.packed_model import REFUSED
from memfit.units import Budget

GIB = 2**30
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
TURING, AMPERE, BLACKWELL, PASCAL = (7, 5), (8, 6), (12, 0), (6, 1)
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.fixture(scope="module")
def here() -> Environment:
    return look_around()


def nvidia(capability: tuple[int, int] = AMPERE, cuda: tuple[int, int] = (12, 8)) -> Driver:
    card = DriverCard("NVIDIA GeForce RTX 3060", capability, 12 * GIB, 0)
    return Driver("570.124", cuda, (card,))


def machine(here: Environment, **changes: Any) -> Environment:
    """This machine, but with the given parts."""
    return dataclasses.replace(here, **changes)


def problems(found: Environment) -> list[Finding]:
    return [one for one in findings(found) if one.kind == "problem"]


# ---- what there is ----


def test_every_requirement_is_listed_and_met_here(here: Environment) -> None:
    required = {one.name: one for one in here.packages if one.required}
    assert required["torch"].version == importlib.metadata.version("torch")
    assert required["torch"].wanted == ">=2.11"
    assert {"transformers", "accelerate", "datasets", "scikit-learn"} <= required.keys()
    assert [name for name, one in required.items() if one.lacking] == []


def test_without_metadata_the_same_packages_are_required() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    names = [Requirement(one).name for one in project["dependencies"]]
    assert sorted(environment._REQUIRED) == sorted(names)


def test_optional_packages_come_with_what_they_are_for_and_what_installs_them(
    here: Environment,
) -> None:
    optional = [one for one in here.packages if not one.required]
    assert [one.name for one in optional] == list(OPTIONAL)
    assert all(one.purpose and one.command.startswith("pip install ") for one in optional)
    assert here.package("peft").command == 'pip install "peft>=0.21"'


def test_on_windows_triton_is_another_package(here: Environment) -> None:
    from memfit.doctor.environment import packages

    windows = machine(here, system="Windows", packages=tuple(packages("Windows")))
    assert windows.package("triton").name == "triton-windows"
    assert windows.package("triton").command == 'pip install "triton-windows>=3.6"'


def test_a_version_below_the_bound_is_lacking() -> None:
    assert Package("torch", "2.10.0+cpu", ">=2.11").lacking
    assert not Package("torch", "2.11.0+cu130", ">=2.11").lacking
    assert not Package("torch", "2.16.0.dev1", ">=2.11").lacking
    assert Package("transformers", "6.0", ">=5.17,<6").lacking


def test_torch_is_described_as_it_was_built(here: Environment) -> None:
    assert here.torch.version == torch.__version__
    assert here.torch.cuda == torch.version.cuda
    assert here.torch.error == ""


@without_gpu
def test_without_a_driver_there_are_no_cards(here: Environment) -> None:
    assert driver() is None
    assert here.cards == ()
    (note,) = findings(here)
    assert note.kind == "note"
    assert "trains on the CPU" in note.text


# ---- what to do ----


def test_a_missing_requirement_is_fatal_and_named_with_its_command(here: Environment) -> None:
    kept = [one for one in here.packages if one.name != "accelerate"]
    gone = Package("accelerate", None, ">=1.15", required=True)
    (found,) = problems(machine(here, packages=(*kept, gone)))
    assert found.fatal
    assert found.text == "accelerate is not installed; memfit needs >=1.15"
    assert found.command == 'pip install "accelerate>=1.15"'


def test_a_torch_without_cuda_beside_a_card_is_told_with_the_right_build(
    here: Environment,
) -> None:
    build = TorchBuild("2.13.0+cpu")
    (found,) = problems(machine(here, torch=build, driver=nvidia(), cards=()))
    assert "built without CUDA and leaves the NVIDIA GeForce RTX 3060 unused" in found.text
    assert not found.fatal
    assert found.command == (
        'pip install --force-reinstall "torch>=2.11" '
        "--index-url https://download.pytorch.org/whl/cu126"
    )


@pytest.mark.parametrize(
    ("capability", "cuda", "build"),
    [
        (PASCAL, (13, 0), "cu126"),  # later builds have no kernels for it
        (TURING, (12, 4), "cu126"),
        (TURING, (13, 0), "cu130"),
        (AMPERE, (12, 8), "cu126"),
        (BLACKWELL, (12, 8), "cu128"),
        (BLACKWELL, (13, 2), "cu130"),
    ],
)
def test_the_build_of_torch_follows_card_and_driver(
    capability: tuple[int, int], cuda: tuple[int, int], build: str
) -> None:
    command = torch_command(capability, nvidia(capability, cuda), ">=2.11")
    assert command.endswith(f"/whl/{build}")


def test_a_driver_too_old_for_torch_is_told(here: Environment) -> None:
    build = TorchBuild("2.13.0+cu130", cuda="13.0")
    (found,) = problems(machine(here, torch=build, driver=nvidia(cuda=(12, 4)), cards=()))
    assert "driver 570.124 runs CUDA 12.4 at most" in found.text
    assert found.command.endswith("/cu126")


@pytest.mark.parametrize(
    ("architectures", "capability", "lacks"),
    [
        (CU130, PASCAL, True),
        (CU126, PASCAL, False),
        (CU126, BLACKWELL, True),
        (CU130, (12, 1), False),
        (CU126, (8, 9), False),  # sm_86 runs on Ada
        (CU130, (8, 7), False),
        (CU126, (10, 0), True),
        (CU130, (13, 0), False),  # compute_120 is compiled on the spot
        ((), AMPERE, False),  # nothing is known
    ],
)
def test_kernels_run_on_their_own_generation(
    architectures: tuple[str, ...], capability: tuple[int, int], lacks: bool
) -> None:
    build = TorchBuild("2.13.0", cuda="13.0", sees_gpu=True, architectures=architectures)
    assert lacks_kernels(build, capability) is lacks


def test_a_card_without_kernels_is_a_problem_with_a_command(here: Environment) -> None:
    card = Card("NVIDIA GeForce GTX 1080", PASCAL, 8 * GIB, 8 * GIB)
    build = TorchBuild("2.13.0+cu130", cuda="13.0", sees_gpu=True, architectures=CU130)
    old = nvidia(PASCAL, (13, 0))
    (found,) = problems(machine(here, torch=build, driver=old, cards=(card,)))
    assert "no kernel image is available" in found.text
    assert found.command.endswith("/cu126")


def test_memory_that_others_hold_is_worth_a_word(here: Environment) -> None:
    build = TorchBuild("2.13.0+cu130", cuda="13.0", sees_gpu=True, architectures=CU130)
    card = Card("NVIDIA GeForce RTX 3060", AMPERE, 12 * GIB, 8 * GIB)
    found = machine(here, torch=build, driver=nvidia(), cards=(card,))
    assert any(
        "4.00 GiB of the NVIDIA GeForce RTX 3060 are in use" in n.text for n in findings(found)
    )
    free = machine(found, cards=(dataclasses.replace(card, free_bytes=11.9 * GIB),))
    assert findings(free) == []


def test_windows_has_its_own_notes(here: Environment) -> None:
    from memfit.doctor.environment import packages

    build = TorchBuild("2.13.0+cu130", cuda="13.0", sees_gpu=True, architectures=CU130)
    card = Card("NVIDIA GeForce RTX 3060", AMPERE, 12 * GIB, 12 * GIB)
    windows = machine(
        here, system="Windows", packages=tuple(packages("Windows")), torch=build,
        driver=nvidia(), cards=(card,),
    )  # fmt: skip
    triton, fallback = findings(windows)
    assert triton.command == 'pip install "triton-windows>=3.6"'
    assert "Sysmem Fallback" in fallback.text


def test_a_torch_that_cannot_be_imported_is_fatal(here: Environment) -> None:
    error = "OSError: [WinError 126] The specified module could not be found"
    (found,) = findings(machine(here, system="Windows", torch=TorchBuild("2.13.0", error=error)))
    assert found.fatal
    assert "Visual C++ Redistributable" in found.text


# ---- strategies ----


def by_name(found: list[Readiness]) -> dict[str, Readiness]:
    return {one.strategy: one for one in found}


def test_every_strategy_of_the_registry_is_asked_in_its_order(here: Environment) -> None:
    found = readiness(here, find_card("H200"))
    assert [one.strategy for one in found] == [kind.name for kind in ORDER]
    # One process has nobody to share with.
    assert [one.strategy for one in found if not one.ready] == ["fully_sharded"]


def test_an_older_card_is_judged_in_float16_and_not_refused(here: Environment) -> None:
    found = by_name(readiness(here, find_card("T4")))
    assert found["half_precision"].ready
    assert found["lowbit_adamw"].ready
    assert found["cuda_graphs"].ready


@without_gpu
def test_on_a_cpu_strategies_say_themselves_why_they_are_of_no_use(here: Environment) -> None:
    found = by_name(readiness(here))
    assert found["cuda_graphs"].reason == "a cpu has no CUDA graphs"
    assert found["packing"].ready
    assert found["frozen_features"].ready
    assert all(one.command == "" for one in found.values())


def test_without_triton_the_command_that_installs_it_is_given(
    here: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setup, "has_triton", False)
    kept = [one for one in here.packages if one.name != "triton"]
    lacking = machine(here, packages=(*kept, Package("triton", None, ">=3.6", purpose="kernels")))
    found = by_name(readiness(lacking, find_card("RTX 3060")))
    assert found["fused_layers"].reason == "its kernels need Triton, which is not installed"
    assert found["fused_layers"].command == 'pip install "triton>=3.6"'
    assert found["lowbit_adamw"].ready
    assert found["lowbit_adamw"].note == "faster with triton"


def test_without_peft_lora_names_its_command(
    here: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def without_peft(name: str, package: str | None = None) -> Any:
        return None if name == "peft" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_peft)
    kept = [one for one in here.packages if one.name != "peft"]
    lacking = machine(here, packages=(*kept, Package("peft", None, ">=0.21", purpose="--lora")))
    found = by_name(readiness(lacking))["lora"]
    assert found.command == 'pip install "peft>=0.21"'


# ---- what a card can train ----


def stand_in(task: Any) -> Any:
    """A planner by a rule: exact needs 16 bytes a parameter, rounding 8, all that is allowed 4."""
    size = task.config.hidden_size**2 * task.config.num_hidden_layers * 12
    if task.config.hidden_size == 128:
        raise TraceError("no rule for an operator of this model")
    needs = size * (16 if task.exact else 4 if task.allow else 8)
    seconds, peak = 32 * needs / task.budget_bytes, SimpleNamespace(components={})
    price = SimpleNamespace(device_bytes=needs, step_seconds=seconds, peak=peak)
    digest = SimpleNamespace(budget_bytes=task.budget_bytes)
    plan: Any = SimpleNamespace(price=price, strategies=(Packing(),), digest=digest)
    if needs > task.budget_bytes:
        raise NothingFitsError(plan, needs - task.budget_bytes, ())
    return SimpleNamespace(chosen=plan)


def reached(budget: float, *names: str) -> list[Reach]:
    models = [one for one in well_known() if one.name in names]
    return list(reaches(find_card("RTX 3060 12GB"), int(budget), models=models, plan=stand_in))


def test_well_known_models_have_their_published_sizes() -> None:
    from memfit.memory.stock_step import StepSpec
    from memfit.memory.tracing.meta_models import build_on_meta

    published = {
        "BERT-base": 109.5, "BERT-large": 335.1, "XLM-R-base": 278.0, "XLM-R-large": 559.9,
        "DeBERTa-v3-base": 184.4, "ModernBERT-base": 149.6,
    }  # fmt: skip
    sizes = {}
    for model in well_known():
        config = model_config(model)
        made = build_on_meta(StepSpec(config=config, rows=1, length=1), config)
        sizes[model.name] = round(sum(one.numel() for one in made.parameters()) / 1e6, 1)
    assert sizes == published


def test_a_line_is_the_planners_answer_for_each_fidelity() -> None:
    (small,), (large,) = reached(1e9, "BERT-base"), reached(11e9, "BERT-base")
    assert small.exact
    assert small.rounding
    assert [cell.fits for cell in (small.exact, small.rounding)] == [False, True]
    assert large.exact
    assert large.exact.fits
    assert large.allowed is small.allowed is None
    assert small.rounding.strategies == ("packing",)
    assert small.rounding.texts_per_second == pytest.approx(1e9 / small.rounding.device_bytes)


@pytest.fixture(scope="module")
def tight() -> list[Reach]:
    """What a gigabyte of an RTX 3060 trains."""
    return reached(1e9, "BERT-base", "BERT-large")


def test_a_cell_that_does_not_fit_says_what_the_smallest_plan_needs(tight: list[Reach]) -> None:
    (row,) = (one for one in tight if one.model.name == "BERT-large")
    assert row.exact
    assert row.rounding
    assert not row.exact.fits
    assert row.exact.device_bytes > row.rounding.device_bytes > 10**9
    assert row.allowed is not None
    assert row.allowed.device_bytes < row.rounding.device_bytes


def test_a_model_that_cannot_be_priced_does_not_stop_the_table() -> None:
    models = [one for one in well_known() if one.name == "BERT-base"]
    tiny = dataclasses.replace(models[0], config={"hidden_size": 128, "num_attention_heads": 2})
    first, second = reaches(find_card("RTX 3060"), 10**9, models=[tiny, *models], plan=stand_in)
    assert first.problem.startswith("no rule for an operator of")
    assert first.exact is first.rounding is None
    assert second.problem == ""
    assert second.rounding
    assert second.rounding.fits


# ---- the command ----


def test_json_has_every_part_and_nothing_else_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "--json", "--no-table", "--gpu", "RTX 3060"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is True
    assert found["torch"]["version"] == torch.__version__
    assert found["card"]["name"] == "GeForce RTX 3060 12GB"
    assert found["card"]["unknown_bytes"] == round(0.02 * found["card"]["total_bytes"])
    usable = found["card"]["total_bytes"] - found["card"]["unknown_bytes"]
    assert found["budget_bytes"] == usable - 256 * 2**20
    assert found["strategies"]["fused_layers"]["ready"] is True
    assert found["packages"]["peft"]["wanted"] == ">=0.21"
    assert found["trains"] == []


@pytest.mark.parametrize(
    ("card", "said", "command"),
    [
        (find_card("GTX 1080 Ti"), "only builds of torch for CUDA 12.6", "/cu126"),
        (find_card("V100 16GB"), "torch 2.14 is the last", "/cu126"),
        (find_card("GTX 1650"), "has no tensor cores", ""),
        (find_card("T4", CardPlace(windows=True)), "Windows has no Triton", "triton-windows"),
        (find_card("T4", CardPlace(windows=True)), "Sysmem Fallback Policy", ""),
    ],
)
def test_what_is_special_about_a_card_is_said(card: Any, said: str, command: str) -> None:
    (found,) = (one for one in about_card(card) if said in one.text)
    assert found.command.endswith(command)


def test_there_is_nothing_to_say_of_a_usual_card() -> None:
    assert not list(about_card(find_card("RTX 3060")))


def test_a_display_takes_its_part_instead_of_the_usual_headroom() -> None:
    there = find_card("RTX 3060", CardPlace(windows=False, display=True))
    assert budget_bytes(there, Budget()) == there.usable_bytes
    little = dataclasses.replace(there, reserved_bytes=100 * 2**20)
    assert budget_bytes(little, Budget()) == little.usable_bytes - 156 * 2**20


def test_the_text_fits_eighty_columns_and_names_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor", "--no-table"]) == 0
    text = capsys.readouterr().out
    tables = text[text.index("optional package") :]
    assert max(map(len, tables.splitlines())) <= 80
    assert re.search(r"packing +exact +ready", text)
    assert "pip install flash-attn --no-build-isolation" in text


def test_an_unknown_card_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--gpu", "RTX 30600"]) == 2
    assert "no card 'RTX 30600' is known" in capsys.readouterr().err


# ---- in Chinese ----

CHINESE = re.compile(r"[\u4e00-\u9fff]")


def test_every_sentence_about_a_machine_is_said_in_chinese(here: Environment) -> None:
    build = TorchBuild("2.13.0+cu130", cuda="13.0", sees_gpu=True, architectures=CU130)
    held = Card("NVIDIA GeForce GTX 1080", PASCAL, 8 * GIB, 2 * GIB)
    blind = dataclasses.replace(build, sees_gpu=False)
    gone = (*here.packages, Package("accelerate", None, ">=1.15", required=True))
    old = (*here.packages, Package("datasets", "3.0", ">=4", required=True))
    dll = TorchBuild("2.13.0", error="OSError: [WinError 126]")
    windows = {"system": "Windows", "torch": build, "driver": nvidia(PASCAL), "cards": (held, held)}
    with speaking("zh"):
        packages = tuple(environment.packages("Windows"))
        machines = [
            machine(here, torch=TorchBuild("2.13.0+cpu"), driver=None, cards=()),
            machine(here, torch=TorchBuild("2.13.0+cpu"), driver=nvidia(), cards=()),
            machine(here, torch=blind, driver=nvidia(), cards=()),
            machine(here, system="Windows", torch=dll),
            machine(here, torch=dll),
            machine(here, packages=gone),
            machine(here, packages=old),
            machine(here, packages=packages, **windows),
        ]
        said = {one.text for each in machines for one in findings(each)}
        purposes = {one.purpose for one in packages if not one.required}
    assert len(said) == 12
    assert [text for text in said | purposes if not CHINESE.search(text)] == []


def test_whatever_a_strategy_says_about_a_device_is_said_in_chinese(
    here: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(found: Environment) -> set[str]:
        cards = (None, *map(find_card, ("GTX 1080", "T4", "RTX 3060 12GB", "H200")))
        judged = [one for card in cards for one in readiness(found, card)]
        return {text for one in judged for text in (one.reason, one.note) if text}

    with speaking("zh"):
        said = reasons(here)
        monkeypatch.setattr(Setup, "has_triton", False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
        said |= reasons(here)
    assert {"cpu 没有 CUDA graph", "没有安装 peft；请安装：pip install memfit[lora]"} <= said
    assert len(said) == 12
    assert [text for text in said if not CHINESE.search(text)] == []


def test_a_refusal_is_said_with_its_reason_in_chinese() -> None:
    config: Any = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, num_labels=2, pad_token_id=0
    )
    model: Any = GPT2ForSequenceClassification(config)
    args = TrainingArguments(use_cpu=True, report_to="none")
    with pytest.raises(ConfigError) as refused:
        Packing().apply(Setup(model=model, args=args, device=torch.device("cpu")))
    assert str(refused.value) == (
        "packing cannot be used here: gpt2 is a decoder; only encoders are packed so far"
    )
    with speaking("zh"):
        assert str(refused.value) == "packing 在这里不能用：gpt2 是解码器；目前只打包编码器"


def test_a_sentence_nobody_translated_stays_as_it_is() -> None:
    lacking = Message("it needs {needed} of the computer's memory, of which {free} are free",
                      needed="3 GiB", free="1 GiB")  # fmt: skip
    assert shown(lacking, "zh") == "它需要 3 GiB 主机内存，而空闲的只有 1 GiB"
    assert shown(Message("nobody translated this"), "zh") == "nobody translated this"
    assert shown("a strategy of your own {says so}", "zh") == "a strategy of your own {says so}"


@pytest.mark.parametrize("name", REFUSED.values())
def test_what_families_are_refused_for_is_translated(name: str) -> None:
    with speaking("zh"):
        assert CHINESE.search(t(name))


def test_triton_is_not_advised_for_a_card_it_cannot_run_on(here: Environment) -> None:
    found = by_name(readiness(here, find_card("GTX 1080")))
    assert found["fused_layers"].reason.endswith(
        "which needs a card of compute capability 7.0 at least; this one has 6.1"
    )
    assert found["lowbit_adamw"].note == ""
    assert {one.command for one in found.values()} == {""}


def test_chinese_tables_are_aligned_within_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor", "--no-table", "--gpu", "GTX 1080", "--lang", "zh"]) == 0
    text = capsys.readouterr().out
    lines = text[text.index("可选的包") :].splitlines()
    assert max(map(cell_len, lines)) <= 80
    table = lines[lines.index(next(one for one in lines if one.startswith("策略"))) :]
    third = cell_len(table[0].partition("在 GeForce")[0])
    assert {cell_len(line.partition("可用")[0]) for line in table if "可用" in line} == {third}
    assert len([line for line in table if "可用" in line]) == len(ORDER) - 4
    assert re.search(r"紧密拼接 +一致 +可用", text)


def test_the_table_of_models_is_aligned_and_wrapped_in_chinese(
    here: Environment, tight: list[Reach]
) -> None:
    found = Diagnosis(
        environment=here,
        findings=(),
        card=find_card("RTX 3060 12GB"),
        budget_bytes=10**9,
        trains=tuple(tight),
    )
    out = Console(width=80, record=True, file=io.StringIO())
    with speaking("zh"):
        out.print(_trains(found))
    lines = out.export_text().splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert {cell_len(line.rstrip()) for line in lines if line.startswith(("模型", "BERT"))} == {
        cell_len(next(line for line in lines if line.startswith("模型")).rstrip())
    }
    assert "放不下（" in lines[-6] + lines[-5]
    assert not [line for line in lines if line[:1] in set("，。；：、）")]
