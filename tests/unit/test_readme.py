"""What the README and the pages show runs: commands, Python, an estimate."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
# In the order a reader meets them: a command may use what one before it has left.
_PAGES = ("estimating", "planning", "ladder", "cards", "several-cards")
WITH_COMMANDS = (README, *(DOCS / f"{name}.md" for name in _PAGES))
WITH_PYTHON = (
    README, *(DOCS / f"{name}.md" for name in ("from-the-tutorials", "planning", "python"))
)  # fmt: skip
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
BASE_MODEL, LARGE_MODEL = "google-bert/bert-base-chinese", "hfl/chinese-macbert-large"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for info, text in found if info == language]


def commands(*pages: Path) -> list[str]:
    """Every line that starts with memfit in a bash block."""
    texts = itertools.chain.from_iterable(blocks(page, "bash") for page in pages)
    return [line for text in texts for line in text.splitlines() if line.startswith("memfit ")]


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """Instead of the shared one: a reader's second command finds what the first one kept."""


def write_table(path: Path, rows: int, *, labelled: bool) -> None:
    words = ("服務人員都不親切", "服務人員都很親切")
    lines = [("label", "review")]
    lines += [(str(n % 2), words[n % 2] + "早餐好吃"[: n % 5] * (n // 7)) for n in range(rows)]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines if labelled else [line[1:] for line in lines])


@pytest.fixture(scope="module")
def base_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with as many positions as a published one."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("base-model")
    config = BertConfig.from_pretrained(tiny_model_dir, max_position_embeddings=512)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tables the pages speak of, and it is the current one."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (("reviews.csv", 60), ("new.csv", 5), ("test.csv", 12)):
        write_table(tmp_path / name, rows, labelled=name != "new.csv")
    return tmp_path


def config_folder(folder: Path, **sizes: int) -> Path:
    """A folder that holds only a config.json: BERT-Large, or smaller."""
    large = {
        "vocab_size": 21128, "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 512,
    }  # fmt: skip
    folder.mkdir()
    text = json.dumps({"model_type": "bert", **large, **sizes})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_the_commands_shown_run_one_after_the_other(
    desk: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = config_folder(
        desk / "small", hidden_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    first, *rest = commands(*WITH_COMMANDS)
    for command in [first, *rest]:
        words = shlex.split(command.replace(BASE_MODEL, "BASE").replace(LARGE_MODEL, "LARGE"))[1:]
        words = [{"BASE": str(base_model), "LARGE": str(small)}.get(word, word) for word in words]
        if command == first:
            words += ["--output-dir", "first"]
        if words[0] == "ladder":
            continue  # each rung has a process of its own: tests/e2e/test_ladder_command.py runs it
        if "--gpus" in words:
            continue  # it starts processes: tests/faults/test_ranks_command.py runs it
        if "--measure" in words:
            continue  # it takes a minute: tests/unit/test_doctor_measure.py runs it
        assert run(words) == 0, f"{command}: {capsys.readouterr().err}"
    capsys.readouterr()
    assert (desk / "again" / "summary.json").is_file()
    labelled = (desk / "labelled.csv").read_text(encoding="utf-8").splitlines()
    assert labelled[0] == "\ufeffreview,label,score"
    assert len(labelled) == 6
    assert (desk / "step.html").is_file()


def test_other_pages_show_commands_that_were_run() -> None:
    others = {*ROOT.glob("*.md"), *DOCS.rglob("*.md")} - set(WITH_COMMANDS)
    assert set(commands(*sorted(others))) <= set(commands(*WITH_COMMANDS))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # plain arguments on a CPU
def test_the_python_shown_runs(
    desk: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    shown = {text: page for page in WITH_PYTHON for text in blocks(page, "python")}
    for text, page in shown.items():
        code = text.replace(f'"{BASE_MODEL}"', repr(str(base_model)))
        exec(compile(code, str(page), "exec"), names)
    assert (desk / "run-py" / "model.safetensors").is_file()
    assert names["trainer"].state.global_step == 4  # 54 rows, effective batch 32, two epochs
    printed = capsys.readouterr().out
    assert "'f1'" in printed
    assert "MicroBatching(" in printed


def test_the_estimate_shown_is_the_estimate_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks(DOCS / "estimating.md", "console")
    command, _, shown = block.partition("\n")
    large = config_folder(tmp_path / "large")
    words = shlex.split(command.removeprefix("$ memfit ").replace(LARGE_MODEL, str(large)))
    assert run(words) == 0
    made = capsys.readouterr().out

    def plain(text: str) -> list[str]:
        # The bar may shift by a character.
        lines = (line.split() for line in text.splitlines() if not set(line) & set("█│"))
        return [_NUMBER.sub("#", word) for line in lines for word in line]

    def numbers(text: str) -> list[float]:
        return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]

    assert plain(made) == plain(shown)
    assert numbers(made) == pytest.approx(numbers(shown), rel=0.02)
