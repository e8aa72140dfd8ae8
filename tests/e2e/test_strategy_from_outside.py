"""The package of docs/adding-a-strategy.md, installed: planned, trained, resumed and reported."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po
from transformers import TrainerCallback

import memfit
from memfit.cli import run
from memfit.config.plugins import strategy_plugins
from memfit.errors import ConfigError
from memfit.i18n import shown
from memfit.memory.components import Component
from memfit.planner.plans import Plan
from memfit.strategies import all_strategies, by_name, not_loaded, ordered, registry

OPTIMIZER = Component.OPTIMIZER

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-strategy.md"


def block(language: str, containing: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (match,) = [one for one in found if containing in one]
    return match


def install(folder: Path, project: str, points: dict[str, str], **files: str) -> None:
    """Writes what pip would: the modules, and the folder that describes the package."""
    info = folder / f"{project.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    text = "\n".join(["[memfit.strategies]", *lines, ""])
    (info / "entry_points.txt").write_text(text)
    for name, code in files.items():
        (folder / f"{name}.py").write_text(code, encoding="utf-8")


def forget() -> None:
    strategy_plugins.cache_clear()
    registry._with_outside.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are installed to."""
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(str(folder))
    forget()
    yield folder
    forget()
    for name in ("toy_strategies", "broken", "elsewhere"):
        sys.modules.pop(name, None)


@pytest.fixture
def toy(site: Path) -> Path:
    """The page's package."""
    project = tomllib.loads(block("toml", "toy-strategies"))["project"]
    points = project["entry-points"]["memfit.strategies"]
    code = block("python", "class MomentumSgd")
    install(site, project["name"], points, toy_strategies=code)
    catalogue = read_po(block("po", "msgid").encode().splitlines(keepends=True))
    with (site / "toy_strategies.mo").open("wb") as file:
        write_mo(file, catalogue)
    return site


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    rows = [f"{'很好' if row % 2 else '不好'}{row},{row % 2}" for row in range(60)]
    path.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    return path


@pytest.mark.usefixtures("toy")
def test_it_stands_after_what_it_follows() -> None:
    names = [kind.name for kind in all_strategies()]
    assert names[names.index("small_state_optimizer") + 1] == "momentum_sgd"
    assert not_loaded() == {}
    half, toy, graphs = by_name("half_precision")(), by_name("momentum_sgd")(), by_name("packing")()
    assert ordered([toy, half, graphs]) == [half, graphs, toy]


class Interruption(Exception):  # noqa: N818
    """What stands in for the power cut."""


class InterruptAfter(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == 4:
            raise Interruption


@pytest.mark.usefixtures("toy")
def test_it_is_planned_trained_saved_resumed_and_reported(
    tmp_path: Path, table: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "model": tiny_model_dir, "seed": 3, "per_device_train_batch_size": 8, "max_steps": 8,
        "save_strategy": "steps", "save_steps": 2, "use_cpu": True, "max_length": 32,
        "learning_rate": 1e-2,
    }  # fmt: skip
    with_adamw = memfit.plan(table, budget="1GB", **settings).chosen.price
    assert with_adamw is not None
    settings |= {"allow": "momentum_sgd", "budget": f"{round(0.9 * with_adamw.device_bytes)}B"}
    planned = memfit.plan(table, **settings)
    (named,) = [one for one in planned.chosen.strategies if one.name == "momentum_sgd"]
    reason = next(one for one in planned.chosen.decisions if one.strategy == "momentum_sgd")
    assert reason.sentence("en") == "SGD with a momentum of 0.9, as you allowed"
    assert reason.sentence("zh") == "按你的许可，使用动量为 0.9 的 SGD"
    assert shown(named.called(), "zh") == "带动量的 SGD"
    price = planned.chosen.price
    assert price is not None
    state, two_moments = (one.peak.components[OPTIMIZER] for one in (price, with_adamw))
    assert state == pytest.approx(two_moments / 2, rel=0.02)

    whole = memfit.finetune(table, output_dir=tmp_path / "whole", quiet=True, **settings)
    cut = {**settings, "output_dir": tmp_path / "cut", "quiet": True}
    with pytest.raises(Interruption):
        memfit.finetune(table, callbacks=[InterruptAfter()], **cut)
    assert [one.name for one in (tmp_path / "cut").rglob("checkpoint-4")]
    resumed = memfit.finetune(output_dir=tmp_path / "cut", resume=True, quiet=True)
    kept = [Plan.read(one.output_dir / "plan.toml").strategies for one in (whole, resumed)]
    assert named in kept[0]
    assert kept[0] == kept[1]
    weights = [memfit.load(one.output_dir).model.state_dict() for one in (whole, resumed)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())

    report = tmp_path / "whole" / "report.html"
    report.unlink()
    assert run(["report", str(tmp_path / "whole")]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    page = report.read_text(encoding="utf-8")
    assert "momentum_sgd" in page
    assert "SGD with a momentum of 0.9, as you allowed" in page


def test_a_package_that_cannot_be_imported_is_a_sentence(
    site: Path, table: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = block("python", "class MomentumSgd").replace('"small_state_optimizer"\n', '"nothing"\n')
    code = re.sub(r"catalogue = .*", "catalogue = None", code)
    points = {
        "broken_one": "broken:Missing",
        "momentum_sgd": "elsewhere:MomentumSgd",
        "other_name": "elsewhere:MomentumSgd",
        "path": "elsewhere:Path",
    }
    install(site, "others", points, broken="raise ImportError('no\\nmodule')", elsewhere=code)
    assert run(["--help"]) == 0
    assert "broken" not in sys.modules
    capsys.readouterr()
    planned = memfit.plan(table, model=tiny_model_dir, budget="1GB", max_length=32, use_cpu=True)
    said = "\n".join(planned.chosen.sentences("en"))
    begins = "it cannot be loaded from others 1.0"
    assert f"not used: broken_one, because {begins}: ImportError: no module" in said
    assert not_loaded() == {
        "broken_one": f"{begins}: ImportError: no module",
        "momentum_sgd": "it follows 'nothing', and there is no such strategy",
        "other_name": f"{begins}: its entry point is other_name, its name momentum_sgd",
        "path": f"{begins}: elsewhere:Path is no Strategy",
    }
    with pytest.raises(ConfigError, match=r"no strategy 'broken_one': it cannot be loaded"):
        by_name("broken_one")
    with pytest.raises(ConfigError, match=r"cannot allow 'broken_one'"):
        memfit.plan(table, model=tiny_model_dir, allow="broken_one", max_length=32, use_cpu=True)
