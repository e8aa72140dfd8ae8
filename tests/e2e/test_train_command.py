"""From a CSV to a labelled sentence with the commands a person types, on a tiny real model."""

from __future__ import annotations

import codecs
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, pipeline

import memfit
from memfit.cli import run
from memfit.config import RunConfig
from memfit.errors import OutputError
from memfit.planner.plan import Plan
from memfit.report.formatting import named
from waits import without_waits

PRAISE = (
    "服務人員都很親切",
    "房間很乾淨，床也很舒服，下次還會再來",
    "位置方便，早餐好吃，價格也不貴",
)
BLAME = ("服務人員都不親切", "房間很髒，空調太吵，再也不會來了", "位置偏僻，早餐難吃，價格還很貴")
QUICK = ("--max-length", "64", "--learning-rate", "3e-3", "--batch-size", "8", "--epochs", "4")
# Where the plan is not what is looked at: half as much to search.
SOON = ("--exact", "--quiet")


def write_reviews(path: Path, rows: int = 240) -> Path:
    draw = random.Random(0)
    lines = ["label,review"]
    for index in range(rows):
        label = index % 2
        text = (BLAME, PRAISE)[label][index // 2 % 3]
        lines.append(f'{label},"{text}{draw.choice("親切乾淨床吵貴") * draw.randint(0, 12)}"')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reviews(tmp_path_factory.mktemp("data") / "reviews.csv")


@pytest.fixture(scope="module")
def trained(reviews: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run through the command line that the tests below look at."""
    output = tmp_path_factory.mktemp("runs") / "run"
    code = run(
        ["train", str(reviews), "--model", str(tiny_model_dir), "--output-dir", str(output),
         "--label-names", "0=負評", "1=正評", "--budget", "4GB", *QUICK]
    )  # fmt: skip
    assert code == 0
    return output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def summary_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return loaded


def test_the_report_names_every_part_whose_time_was_measured(trained: Path) -> None:
    page = (trained / "report.html").read_text(encoding="utf-8")
    for part in summary_of(trained)["seconds"]:
        called = named("work", part)
        assert called.startswith("time ")
        assert called in page


def test_the_result_folder_holds_everything(trained: Path) -> None:
    names = {item.name for item in trained.iterdir()}
    assert names >= {
        "model.safetensors", "config.json", "tokenizer.json", "run.toml", "summary.json",
        "evaluation.json", "trainer_state.json", "report.html", "checkpoints",
    }  # fmt: skip
    assert len(list((trained / "checkpoints").iterdir())) == 3  # save_total_limit, best kept
    summary = summary_of(trained)
    assert summary["metrics"]["f1"] == 1.0
    assert summary["labels"] == ["負評", "正評"]
    assert summary["training"]["steps"] == 108
    assert summary["training"]["effective_batch"] == 8
    assert summary["memory"]["budget_bytes"] == 4 * 10**9
    assert summary["data"]["train_rows"] + summary["data"]["validation_rows"] == 240
    mode = (trained / "config.json").stat().st_mode
    assert (trained / "model.safetensors").stat().st_mode == mode


def test_the_configuration_is_stored_with_full_paths(trained: Path, reviews: Path) -> None:
    config = RunConfig.from_toml(trained / "run.toml")
    assert config.data.path == str(reviews)
    assert config.data.label_names == {"0": "負評", "1": "正評"}
    assert config.budget == "4GB"
    assert config.training == {
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 4.0,
    }


def test_before_training_it_says_what_it_will_do(
    reviews: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        ["train", str(reviews), "--model", str(tiny_model_dir), "--output-dir",
         str(tmp_path / "out"), "--max-length", "20", "--max-steps", "6", "--budget", "2GiB",
         "--freeze", "encoder", "--batch-size", "8"]
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0
    said = captured.err
    assert "216 to train on, 24 to validate" in said
    assert "max_length 20 cuts" in said
    assert "24,226 parameters, 66 of them trainable" in said
    assert "2.15 GB (2.00 GiB)" in said
    assert "8 rows a step" in said
    total = said.index("training: 6 steps, about ")
    assert total < said.index("step 1/6")  # the time is said before it starts
    assert said.index("max_length 20 cuts") < said.index("step 1/6")
    assert "report.html" in captured.out
    assert "true ↓ predicted →" in captured.out


@pytest.mark.usefixtures("undrawn")
def test_json_is_all_there_is_on_stdout(
    reviews: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        ["train", str(reviews), "--model", str(tiny_model_dir), "--output-dir",
         str(tmp_path / "out"), "--max-length", "64", "--max-steps", "3", "--json", *SOON]
    )  # fmt: skip
    captured = capsys.readouterr()
    assert code == 0
    answer = json.loads(captured.out)
    assert answer["output_dir"] == str(tmp_path / "out")
    assert answer["training"]["steps"] == 3
    assert set(answer["metrics"]) == {"accuracy", "f1", "precision", "recall"}
    assert captured.err == ""


def test_predict_answers_with_the_label_names(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(trained), "服務人員都很親切", "服務人員都不親切"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["正評", "負評"]
    assert run(["predict", str(trained), "服務人員都很親切", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["label"]) == ("服務人員都很親切", "正評")
    assert set(answer["scores"]) == {"正評", "負評"}
    assert answer["score"] == max(answer["scores"].values())


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_predict_labels_a_file_row_by_row(
    trained: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.csv"
    texts = ["服務人員都不親切", PRAISE[1], BLAME[1], "服務人員都很親切"]
    source.write_text("review\n" + "\n".join(f'"{text}"' for text in texts), encoding="utf-8")
    target = tmp_path / f"out.{suffix}"
    assert run(["predict", str(trained), "--file", str(source), "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"wrote 4 rows to {target}\n"
    assert target.read_bytes().startswith(codecs.BOM_UTF8) == (suffix != "jsonl")  # for Excel
    lines = target.read_text(encoding="utf-8-sig").splitlines()
    if suffix == "jsonl":
        rows = [(row["review"], row["label"]) for row in map(json.loads, lines)]
    else:
        mark = "," if suffix == "csv" else "\t"
        assert lines[0].split(mark) == ["review", "label", "score"]
        rows = [tuple(line.split(mark)[:2]) for line in lines[1:]]
    assert rows == list(zip(texts, ["負評", "正評", "負評", "正評"], strict=True))
    assert run(["predict", str(trained), "--file", str(source)]) == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in shown] == ["負評", "正評", "負評", "正評"]


def test_a_model_of_single_texts_does_not_take_a_table_of_pairs(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text(f"sentence1,sentence2\n{PRAISE[0]},{BLAME[0]}\n", "utf-8")
    assert run(["predict", str(trained), "--file", str(table)]) == 2
    assert "name the column to use with --text-column" in capsys.readouterr().err
    words = ["--file", str(table), "--text-column", "sentence2", "--json"]
    assert run(["predict", str(trained), *words]) == 0
    assert json.loads(capsys.readouterr().out)[0]["label"] == "負評"


def test_evaluate_gives_the_metrics_of_the_run(
    trained: Path, reviews: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", str(trained), str(reviews), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"] == 240
    matrix = answer["confusion"]
    assert [sum(row) for row in matrix] == [120, 120]
    assert answer["metrics"]["accuracy"] == (matrix[0][0] + matrix[1][1]) / 240 > 0.95
    assert run(["evaluate", str(trained), str(reviews)]) == 0
    assert "on 240 rows\n" in capsys.readouterr().out


def test_evaluate_says_which_rows_it_left_out(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "holes.csv"
    table.write_text(f"label,review\n1,{PRAISE[0]}\n0,{BLAME[0]}\n1,\n,好\n,壞\n", "utf-8")
    assert run(["evaluate", str(trained), str(table), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["rows"], answer["dropped"]) == (2, {"no_text": 1, "no_label": 2})
    assert run(["evaluate", str(trained), str(table)]) == 0
    assert "on 2 rows; left out 1 without text and 2 without label" in capsys.readouterr().out


def test_report_draws_the_page_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = trained / "report.html"
    before = page.read_text(encoding="utf-8")
    page.unlink()
    assert run(["report", str(trained)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert len(page.read_text(encoding="utf-8")) == len(before)


def test_the_stock_pipeline_and_load_answer_alike(trained: Path) -> None:
    classify = pipeline("text-classification", str(trained))
    stock = classify(["服務人員都很親切", "服務人員都不親切"])
    ours = memfit.load(trained).predict(["服務人員都很親切", "服務人員都不親切"])
    assert [answer["label"] for answer in stock] == ["正評", "負評"]
    assert [answer.label for answer in ours] == ["正評", "負評"]
    assert [answer.score for answer in ours] == pytest.approx(
        [answer["score"] for answer in stock], abs=1e-6
    )


@pytest.mark.usefixtures("undrawn")
def test_the_stored_configuration_reruns_to_the_same_weights(trained: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    words = ["train", "--config", str(trained / "run.toml"), "--output-dir", str(again), "--quiet"]
    assert run(words) == 0
    assert summary_of(again)["metrics"] == summary_of(trained)["metrics"]
    assert same_weights(trained, again)


class CtrlC(TrainerCallback):
    """Presses Ctrl-C in the middle of an epoch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_resumes_to_the_same_weights(
    trained: Path, reviews: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "interrupted"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        memfit.finetune(
            reviews, model=tiny_model_dir, output_dir=output, budget="4GB", max_length=64,
            learning_rate=3e-3, batch_size=8, epochs=4, quiet=True,
            label_names={0: "負評", 1: "正評"}, callbacks=[CtrlC(40)],
            plan=Plan.read(trained / "plan.toml"),
        )  # fmt: skip
    assert signal.getsignal(signal.SIGINT) is before
    assert (output / "checkpoints" / "checkpoint-41" / "trainer_state.json").is_file()
    assert not (output / "summary.json").exists()
    log = output / "progress.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "now_bytes" in line][-1]
    assert 20 <= last["step"] <= 41
    assert last["seconds"] > 0
    last["seconds"] = 1000.0
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert run(["train", "--resume", "--output-dir", str(output), "--quiet"]) == 0
    assert summary_of(output)["training"]["steps"] == 108
    assert summary_of(output)["seconds"]["train"] > 1000
    assert same_weights(trained, output)


def test_the_seconds_of_the_parts_add_up(trained: Path) -> None:
    seconds = summary_of(trained)["seconds"]
    total = seconds.pop("total")
    assert set(seconds) == {"data", "import", "load", "plan", "train", "evaluate", "save"}
    assert sum(seconds.values()) == pytest.approx(total, rel=0.1)


def test_resuming_a_finished_run_says_so_and_changes_nothing(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {item: item.stat().st_mtime_ns for item in trained.rglob("*")}
    capsys.readouterr()
    assert run(["train", "--resume", "--output-dir", str(trained)]) == 0
    said = capsys.readouterr()
    assert "has already finished" in said.err
    assert "108 steps" in said.out
    assert {item: item.stat().st_mtime_ns for item in trained.rglob("*")} == before


def test_resuming_with_another_configuration_is_refused_with_what_differs(trained: Path) -> None:
    with pytest.raises(OutputError, match=r"max_length: 32, not 64.*learning_rate: 0.1, not 0.003"):
        memfit.finetune(output_dir=trained, resume=True, learning_rate=0.1, max_length=32)


@pytest.mark.usefixtures("undrawn")
def test_a_small_budget_is_kept_with_smaller_micro_batches(
    trained: Path, reviews: Path, tiny_model_dir: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    capsys.readouterr()
    words = ["train", str(reviews), "--model", str(tiny_model_dir), "--max-length", "64",
             "--batch-size", "32", "--max-steps", "4", "--output-dir"]  # fmt: skip
    assert run([*words, str(tmp_path / "small"), "--budget", "1MB", "--exact"]) == 0
    said = capsys.readouterr().err
    assert "32 rows a step, at most" in said
    assert "by prediction" in said
    memory = summary_of(tmp_path / "small")["memory"]
    assert memory["budget_bytes"] == 10**6
    assert memory["predicted"]["device_bytes"] <= 10**6
    # Inside the budget the guard may prefer smaller micro-batches to recomputing, or the reverse.
    assert memory["measured"]["device_bytes"] <= 10**6
    predicted = memory["predicted"]["device_bytes"]
    assert memory["measured"]["device_bytes"] == pytest.approx(predicted, rel=0.06)
    for part in ("weights", "gradients", "optimizer"):
        assert memory["measured"]["components"][part] == memory["predicted"]["components"][part]
    # With 4 GB a quarter of the rows is more than that.
    assert summary_of(trained)["memory"]["predicted"]["device_bytes"] > 10**6


def test_a_budget_nothing_fits_is_exit_code_3_and_leaves_nothing(
    reviews: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        ["train", str(reviews), "--model", str(tiny_model_dir), "--max-length", "64",
         "--output-dir", str(tmp_path / "out"), "--budget", "100KB", "--exact"]
    )  # fmt: skip
    said = without_waits(capsys.readouterr().err)
    assert code == 3
    assert len(said.splitlines()) == 1
    assert "are missing" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("task", "labels", "metrics"),
    [
        ("regression", ("1.5", "4.0"), {"mse", "mae"}),
        ("multi_label", ("服務|房間", "早餐"), {"f1", "f1_macro"}),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_the_other_tasks_go_the_same_way(
    tiny_model_dir: Path, tmp_path: Path, task: str, labels: tuple[str, str], metrics: set[str]
) -> None:
    data = tmp_path / "data.csv"
    rows = [f'{labels[index % 2]},"{(BLAME, PRAISE)[index % 2][0]}"' for index in range(40)]
    data.write_text("\n".join(["label,review", *rows]) + "\n", encoding="utf-8")
    result = memfit.finetune(
        data, model=tiny_model_dir, output_dir=tmp_path / "run", task=task, max_length=32,
        max_steps=4, batch_size=8, exact=True, quiet=True,
    )  # fmt: skip
    assert result.summary.task == task
    assert set(result.metrics) >= metrics
    assert len(memfit.load(result.output_dir).predict(["服務人員"])) == 1


@pytest.mark.usefixtures("undrawn")
def test_pairs_of_texts_go_through_every_command(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "pairs.csv", tmp_path / "run"
    rows = [f'{index % 2},"{PRAISE[0]}","{(BLAME, PRAISE)[index % 2][0]}"' for index in range(40)]
    data.write_text("\n".join(["label,one,other", *rows]) + "\n", encoding="utf-8")
    columns = ["--text-column", "one", "--text-pair-column", "other"]
    words = ["--model", str(tiny_model_dir), "--output-dir", str(output), "--max-length", "32"]
    assert run(["train", str(data), *words, *columns, "--max-steps", "2", *SOON]) == 0
    assert run(["evaluate", str(output), str(data), *columns, "--json"]) == 0
    capsys.readouterr()
    assert run(["predict", str(output), "--file", str(data), *columns, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert len(answers) == 40
    assert (answers[0]["text"], answers[0]["text_pair"]) == (PRAISE[0], BLAME[0])
    assert run(["predict", str(output), PRAISE[0]]) == 2
    assert "was trained on pairs of texts and got single ones" in capsys.readouterr().err
    assert run(["predict", str(output), "--file", str(data), *columns[:2]]) == 2
    (tmp_path / "first.csv").write_text(f'one,other\n"{PRAISE[0]}","{BLAME[0]}"\n', "utf-8")
    target = tmp_path / "answers.jsonl"
    words = ["--file", str(tmp_path / "first.csv"), "--output", str(target), "--json"]
    assert run(["predict", str(output), *words, *columns]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1
    assert json.loads(target.read_text("utf-8"))["label"] == answers[0]["label"]


@pytest.mark.usefixtures("undrawn")
def test_lora_is_merged_into_the_saved_model(
    reviews: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    result = memfit.finetune(
        reviews, model=tiny_model_dir, output_dir=tmp_path / "run", lora=4, max_length=64,
        max_steps=20, learning_rate=1e-2, exact=True, quiet=True,
    )  # fmt: skip
    assert result.summary.training["learning_parameters"] < 5000
    merged, base = weights(result.output_dir), weights(tiny_model_dir)
    assert merged.keys() == base.keys()
    name = "bert.encoder.layer.1.attention.self.{}.weight"
    assert not torch.equal(merged[name.format("query")], base[name.format("query")])
    assert torch.equal(merged[name.format("key")], base[name.format("key")])
    logits = memfit.load(result.output_dir).evaluate(PRAISE, [1, 1, 1])
    assert logits.rows == 3
