"""Wrong input: exit code 2, one sentence on stderr, no traceback, nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from memfit.cli import run
from waits import without_waits

GOOD_ROWS = ["1,服務人員都很親切", "0,服務人員都不親切"] * 12


def write_table(path: Path, rows: Sequence[str], header: str = "label,review") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "reviews.csv", GOOD_ROWS)


def refused(capsys: pytest.CaptureFixture[str], output: Path | None, *words: str | Path) -> str:
    """Runs the command, checks all that every refusal has in common, and returns the sentence."""
    target = ["--output-dir", str(output)] if output is not None else []
    code = run([*map(str, words), *target])
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    said = without_waits(captured.err)
    assert len(said.splitlines()) == 1, captured.err
    assert said.startswith("memfit: ")
    assert "Traceback" not in said
    if output is not None:
        assert not output.exists()
    return said


@pytest.mark.parametrize(
    ("rows", "header", "sentence"),
    [
        (["1,服務,x"], "label,stars,colour", "no text column"),
        (["1,好"] * 9, "label,review", "one class only"),
        ([*GOOD_ROWS, "2,普通"], "label,review", "has a single row"),
        (["1,", "0,"] * 9, "label,review", "none of the 18 rows can be used"),
        ([",服務人員", ",早餐"] * 9, "label,review", "none of the 18 rows can be used"),
        ([], "label,review", "no rows"),
    ],
)
def test_a_table_that_cannot_be_learned_from(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_model_dir: Path,
    rows: list[str],
    header: str,
    sentence: str,
) -> None:
    data = write_table(tmp_path / "bad.csv", rows, header)
    error = refused(capsys, tmp_path / "out", "train", data, "--model", tiny_model_dir)
    assert sentence in error
    assert "bad.csv" in error
    if sentence == "no text column":
        assert all(name in error for name in header.split(","))


def test_a_file_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model_dir: Path
) -> None:
    error = refused(
        capsys, tmp_path / "out", "train", tmp_path / "none.csv", "--model", tiny_model_dir
    )
    assert f"there is no file {tmp_path / 'none.csv'}" in error


def test_a_file_that_is_not_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model_dir: Path
) -> None:
    picture = tmp_path / "picture.csv"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8)
    error = refused(capsys, tmp_path / "out", "train", picture, "--model", tiny_model_dir)
    assert "picture.csv" in error


@pytest.mark.parametrize(
    ("rows", "label"), [(["1,房間很髒"] * 3, "0"), (["1,房間", "0,早餐", "2,普通"] * 2, "2")]
)
def test_a_label_that_only_one_split_has(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    table: Path,
    tiny_model_dir: Path,
    rows: list[str],
    label: str,
) -> None:
    held = write_table(tmp_path / "held.csv", rows)
    error = refused(
        capsys, tmp_path / "out", "train", table, "--model", tiny_model_dir,
        "--validation-file", held,
    )  # fmt: skip
    assert label in error
    assert "held.csv" in error


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lerning-rate", "1e-5"], "no option --lerning-rate. Did you mean --learning-rate?"),
        (["--max-lenght=64"], "Did you mean --max-length?"),
        (["--max-length", "long"], "--max-length"),
        (["--budget", "4 bananas"], "cannot read the budget '4 bananas'"),
        (["--budget", "0GB"], "a budget of 0GB leaves no memory"),
        (["--eval-strategy", "sometimes"], "sometimes"),
        (["--metric-for-best-model", "f2"],
         "--metric-for-best-model is 'f2'; this task's are loss, accuracy, f1, precision, recall."),
        (["--metric-for-best-model", "acuracy"], "Did you mean 'accuracy'?"),
        (["--metric-for-best-model", "mse"], "--metric-for-best-model is 'mse'"),
        (["--epochs", "0"], "--epochs (num_train_epochs) is 0"),
        (["--epochs", "-1"], "--epochs (num_train_epochs) is -1"),
        (["--batch-size", "0"], "--batch-size (per_device_train_batch_size) is 0"),
        (["--max-steps", "0"], "--max-steps is 0; write 1 or more"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0; write 0 or more"),
        (["--adam-beta1", "1.5"], "--adam-beta1 is 1.5; write a number from 0 to below 1"),
        (["--lr-scheduler-kwargs", '{"bogus": 1}'], "unexpected keyword argument 'bogus'"),
        (["--optim", "lomo"], "lomo"),
        (["--prediction-loss-only"], "--prediction-loss-only leaves out predictions"),
        (["--no-eval-do-concat-batches"], "--no-eval-do-concat-batches leaves out predictions"),
        (["--max-length", "64", "--dataloader-drop-last"],
         "--dataloader-drop-last leaves out all "),
        (["--max-length", "64", "--batch-eval-metrics"], "transformers refuses what was given: "),
        (["--optim", "adafctor"], "'adafctor' is not one of its OptimizerNames. Did you mean "
         "'adafactor'?"),
        (["--max-length", "65"], "max_length 65 is beyond the 64 positions"),
        (["--max-length", "64", "--freeze", "9"], "more than the 2 layers"),
        (["--validation-split", "2"], "between 0 and 1"),
        (["--text-column", "txt"], "txt"),
        (["--label-names", "負評", "正評"], "write label=name"),
        (["--config", "none.toml"], "cannot read the configuration none.toml"),
    ],
)  # fmt: skip
def test_a_wrong_option(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    table: Path,
    tiny_model_dir: Path,
    words: list[str],
    sentence: str,
) -> None:
    error = refused(capsys, tmp_path / "out", "train", table, "--model", tiny_model_dir, *words)
    assert sentence in error


def test_a_wrong_key_in_the_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, table: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[training]\nlearningrate = 1e-5\n")
    error = refused(capsys, tmp_path / "out", "train", table, "--config", config)
    assert "unknown key 'learningrate' in [training]. Did you mean 'learning_rate'?" in error


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("config.json", "has no config.json"), ("model.safetensors", "has no weights")],
)
def test_a_model_folder_with_a_part_missing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    table: Path,
    tiny_model_dir: Path,
    missing: str,
    sentence: str,
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / missing).unlink()
    assert sentence in refused(capsys, tmp_path / "out", "train", table, "--model", model)


def test_no_model_no_data_and_no_output_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, table: Path, tiny_model_dir: Path
) -> None:
    assert "no model given" in refused(capsys, tmp_path / "out", "train", table)
    no_data = refused(capsys, tmp_path / "out", "train", "--model", tiny_model_dir)
    assert "no data file given" in no_data
    assert "--output-dir" in refused(capsys, None, "train", table, "--model", tiny_model_dir)


def test_more_than_one_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, table: Path, tiny_model_dir: Path
) -> None:
    words = ["train", table, "b.csv", "--model", tiny_model_dir]
    assert "takes one table and got 2" in refused(capsys, tmp_path / "out", *words)


def test_an_output_folder_that_holds_another_run_is_left_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, table: Path, tiny_model_dir: Path
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "run.toml").write_text("budget = 'auto'\n")
    error = refused(capsys, None, "train", table, "--model", tiny_model_dir, "--output-dir", output)
    assert "already holds another run" in error
    assert "--resume" in error
    assert [item.name for item in output.iterdir()] == ["run.toml"]


def test_nothing_to_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = refused(capsys, tmp_path / "out", "train", "--resume")
    assert "there is no run to resume" in error


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["predict", "MODEL"], "give either sentences or --file"),
        (["predict", "MODEL", "好", "--file", "a.csv"], "give either sentences or --file"),
        (["predict", "MODEL", "--file", "none.csv"], "there is no file none.csv"),
        (["predict", "MODEL", "好", "--output", "out.csv"], "--output goes with --file"),
        (["predict", "MODEL", "--file", "a.csv", "--output", "o.xlsx"], "cannot write .xlsx"),
        (["predict", "MODEL", "--file", "a.csv", "--output", "no/o.csv"], "there is no folder no"),
        (["predict", "./nowhere", "好"], "there is no model folder ./nowhere"),
        (["predict", "MODEL", "好", "--txt-column", "a"], "Did you mean --text-column?"),
        (["evaluate", "MODEL", "none.csv"], "there is no file none.csv"),
        (["evaluate", "MODEL"], "data"),
        (["report", "nowhere"], "there is no summary.json in nowhere"),
        (["trian"], "Did you mean 'train'?"),
    ],
)
def test_the_other_commands(
    capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, words: list[str], sentence: str
) -> None:
    named = [str(tiny_model_dir) if word == "MODEL" else word for word in words]
    assert sentence in refused(capsys, None, *named)


def test_in_a_shell_it_is_the_same_and_torch_is_never_imported(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    words = ["train", "none.csv", "--model", str(tiny_model_dir), "--output-dir", "out"]
    code = (
        "import sys, memfit.cli as cli;"
        f"code = cli.run({words!r});"
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False 2\n"
    said = without_waits(done.stderr)
    assert said.splitlines() == ["memfit: there is no file none.csv; check the path."]
    assert list(tmp_path.iterdir()) == []
