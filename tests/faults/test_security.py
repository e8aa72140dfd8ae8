"""Nothing that is read runs, nothing that is shown acts, no token is kept, no path leads out."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import trainer_in

import memfit
from memfit.cli import run
from memfit.errors import ModelError, OutputError
from memfit.printing import clean, escaped_json, printable, without_tokens
from memfit.records.results import claim_output_folder
from memfit.records.run_log import RunLog
from memfit.run.partial_output import partial_output
from memfit.training.checkpoints import MANIFEST, newest_good, problem_with, write_manifest

SOURCE = Path(memfit.__file__).parent
TOKEN = "hf_" + "Zq7X" * 9
ENVIRONMENT_TOKEN = "a-token-of-another-form-1234"


class RunsCode:
    """A pickle that makes a file when it is loaded without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def malicious(path: Path, mark: Path, *, zipped: bool) -> None:
    if zipped:
        torch.save({"state": RunsCode(mark)}, path)
    else:
        path.write_bytes(pickle.dumps(RunsCode(mark)))


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    trainer_in(tmp_path / "run", max_steps=2).train()
    return tmp_path / "run"


# ---- what is loaded ----


def test_the_trap_works(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    malicious(tmp_path / "a.pt", tmp_path / "mark", zipped=True)
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "mark").exists()


def test_no_file_of_ours_unpickles_without_care() -> None:
    calls = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load", "pickle.load", "pickle.loads", "joblib.load", "eval", "exec",
            ):  # fmt: skip
                keywords = {item.arg: ast.unparse(item.value) for item in node.keywords}
                if keywords.get("weights_only") != "True":
                    calls.append(f"{path.name}: {ast.unparse(node)}")
    assert calls == []


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_that_would_run_code_is_refused_in_words(
    begun: Path, tmp_path: Path, name: str, zipped: bool
) -> None:
    checkpoint, mark = begun / "checkpoint-2", tmp_path / "mark"
    malicious(checkpoint / name, mark, zipped=zipped)
    write_manifest(checkpoint)  # whoever can write the one can write the other
    with pytest.raises(OutputError, match=r"cannot go on from .*checkpoint-2: "):
        trainer_in(begun, max_steps=3).train(resume_from_checkpoint=True)
    assert not mark.exists()


def test_training_arguments_of_a_checkpoint_are_not_even_read(begun: Path, tmp_path: Path) -> None:
    checkpoint, mark = begun / "checkpoint-2", tmp_path / "mark"
    malicious(checkpoint / "training_args.bin", mark, zipped=True)
    write_manifest(checkpoint)
    trainer_in(begun, max_steps=3).train(resume_from_checkpoint=True)
    assert not mark.exists()


def test_weights_that_would_run_code_are_refused(
    tiny_model_dir: Path, tmp_path: Path, begun: Path
) -> None:
    mark = tmp_path / "mark"
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / "model.safetensors").unlink()
    malicious(model / "pytorch_model.bin", mark, zipped=True)
    with pytest.raises(ModelError, match="cannot load the model"):
        memfit.load(model)
    checkpoint = begun / "checkpoint-2"
    (checkpoint / "model.safetensors").unlink()
    malicious(checkpoint / "pytorch_model.bin", mark, zipped=True)
    write_manifest(checkpoint)
    with pytest.raises(OutputError, match="cannot go on from"):
        trainer_in(begun, max_steps=3).train(resume_from_checkpoint=True)
    assert not mark.exists()


@pytest.fixture
def with_code(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model whose configuration asks for code of its own."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.Own", "AutoModelForSequenceClassification": "own.M"}}
    config["model_type"] = "own-kind"
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    return model


TABLE = "label,review\n" + "1,服務人員都很親切\n0,服務人員都不親切\n" * 8


@pytest.mark.parametrize("command", ["train", "predict", "evaluate", "estimate"])
def test_code_that_comes_with_a_model_runs_only_when_asked_by_name(
    with_code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text(TABLE)
    words = {
        "train": [str(table), "--model", str(with_code), "--output-dir", str(tmp_path / "out")],
        "predict": [str(with_code), "好"],
        "evaluate": [str(with_code), str(table)],
        "estimate": ["--model", str(with_code)],
    }[command]
    assert run([command, *words]) == 2
    said = capsys.readouterr().err
    assert "needs code of its own" in said
    assert not (tmp_path / "mark").exists()
    if command == "train":  # and by name it does, up to what this code is worth
        assert run([command, *words, "--trust-remote-code"]) == 2
        assert (tmp_path / "mark").exists()


def test_a_tokenizer_of_its_own_does_not_run_either(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    run(["predict", str(model), "好"])
    capsys.readouterr()
    assert not (tmp_path / "mark").exists()


# ---- what is shown ----

ACTING = "\x1b[31m\x1b]0;owned\x07\x9b2J\u202e"


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x1b", "\x7f", "\x9b", "\u202e", "\u2028"])
def test_no_character_that_acts_comes_through(character: str) -> None:
    assert clean(f"a{character}b") == "a b"
    assert printable(f"a{character}\nb") == "a \nb"
    escaped = escaped_json(json.dumps({"text": f"a{character}b"}, ensure_ascii=False))
    assert character not in escaped
    assert json.loads(escaped) == {"text": f"a{character}b"}


def test_file_names_columns_and_labels_do_not_act_on_the_terminal(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(tiny_model_dir), str(tmp_path / "out")
    label = f"{ACTING}[red]bad[/red]"
    named = tmp_path / f"a{ACTING}.csv"
    cases = [
        ["train", str(named), "--model", model, "--output-dir", out],
        ["train", str(tmp_path / "b.csv"), "--model", model, "--output-dir", out,
         "--text-column", ACTING],
        ["train", str(tmp_path / "c.csv"), "--model", model, "--output-dir", out],
        ["predict", f"{tmp_path}/x{ACTING}", "好"],
        ["report", f"{tmp_path}/x{ACTING}"],
        ["train", "--config", f"{tmp_path}/x{ACTING}.toml"],
        [f"tr{ACTING}ain"],
        ["train", f"--lern{ACTING}", "1"],
    ]  # fmt: skip
    (tmp_path / "b.csv").write_text(f"{label},{ACTING}two\n1,2\n")
    (tmp_path / "c.csv").write_text(f'label,review\n"{label}",好\n' * 9)
    for words in cases:
        assert run(words) == 2
        captured = capsys.readouterr()
        assert not set(ACTING) & {"\x1b", "\x07", "\x9b", "\u202e"} & set(captured.err), words
        assert captured.out == ""


def test_labels_and_texts_that_act_train_and_are_shown_as_what_they_are(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = f"{ACTING}[red]bad", "<script>alert(1)</script>"
    table = tmp_path / "reviews.csv"
    rows = f'"{bad}","服務 <img src=x onerror=alert(2)> {ACTING}"\n"{good}",服務人員都不親切\n' * 12
    table.write_text(f"label,review\n{rows}", encoding="utf-8")
    out = tmp_path / "out"
    words = ["train", str(table), "--model", str(tiny_model_dir), "--output-dir", str(out)]
    assert run([*words, "--max-length", "16", "--batch-size", "8", "--epochs", "1"]) == 0
    shown = [capsys.readouterr()]
    assert run(["predict", str(out), f"好{ACTING}", "[bold]不[/bold]"]) == 0
    shown.append(capsys.readouterr())
    assert run(["predict", str(out), "--json", f"好{ACTING}"]) == 0
    shown.append(capsys.readouterr())
    for captured in shown:
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(captured.out + captured.err)
    assert "[red]bad" in shown[0].out
    assert "[bold]不[/bold]" in shown[1].out
    assert json.loads(shown[2].out)[0]["text"] == f"好{ACTING}"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert page.count("</script>") == page.count("<script")  # none is ended from the inside
    assert "<img src=x" not in page
    assert "&lt;script&gt;" in page
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(page)


# ---- tokens ----


def test_tokens_are_known_by_their_form_and_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", ENVIRONMENT_TOKEN)
    modelscope = "ms-12345678-abcd-abcd-abcd-1234567890ab"
    for secret in (TOKEN, ENVIRONMENT_TOKEN, modelscope, "https://me:pass-word@host/x.csv"):
        hidden = without_tokens(f"got {secret} from there")
        assert "…" in hidden
        assert not {TOKEN, ENVIRONMENT_TOKEN, modelscope, "pass-word"} & set(hidden.split())
        assert "pass-word" not in hidden
    for plain in ("hf_hub", "https://huggingface.co/a/b", "ms-marco", "a:b@c"):
        assert without_tokens(plain) == plain


def test_no_token_is_in_any_file_of_a_run_nor_on_the_screen(
    by_plan: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", ENVIRONMENT_TOKEN)
    out = tmp_path / "out"
    words = [*by_plan, "--epochs", "1", "--output-dir", str(out), "--hub-token", TOKEN,
             "--run-name", f"of {TOKEN}"]  # fmt: skip
    assert run(words) == 0
    captured = capsys.readouterr()
    secrets = (TOKEN, ENVIRONMENT_TOKEN)
    assert not any(secret in captured.out + captured.err for secret in secrets)
    for path in (item for item in out.rglob("*") if item.is_file()):
        content = path.read_bytes()
        if path.name != "training_args.bin":  # holds what the user wrote, the token fields aside
            assert not any(secret.encode() in content for secret in secrets), path
        assert ENVIRONMENT_TOKEN.encode() not in content
    assert run(["predict", str(tmp_path / TOKEN), "好"]) == 2
    assert TOKEN not in capsys.readouterr().err


# ---- paths ----


@pytest.mark.parametrize(
    "name", ["../outside.txt", "/etc/passwd", "a/../../outside.txt", "..\\outside.txt", "C:x"]
)
def test_a_manifest_that_names_a_file_outside_is_no_manifest(begun: Path, name: str) -> None:
    import hashlib

    checkpoint = begun / "checkpoint-2"
    (begun / "outside.txt").write_text("x")
    values = json.loads((checkpoint / MANIFEST).read_text())
    del values["sha256"]
    values["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    own = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**values, "sha256": own}))
    assert "outside the checkpoint" in problem_with(checkpoint)


def test_links_in_the_place_of_checkpoints_and_files_are_not_followed(
    begun: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(begun / "checkpoint-2", elsewhere)
    (begun / "checkpoint-9").symlink_to(elsewhere)
    found = newest_good(begun)
    assert found.good == begun / "checkpoint-2"
    assert found.passed_over == ((begun / "checkpoint-9", "it is a link to somewhere else"),)
    weights = begun / "checkpoint-2" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(elsewhere / "model.safetensors")
    assert problem_with(begun / "checkpoint-2") == ("model.safetensors is a link to somewhere else")
    with pytest.warns(UserWarning, match="is passed over"):
        trainer_in(begun, max_steps=3, save_total_limit=1).train(resume_from_checkpoint=True)
    # Rotated away: the links are gone, what they led to is not.
    assert [item.name for item in begun.iterdir()] == ["checkpoint-3"]
    assert problem_with(elsewhere) == ""


def test_a_link_in_the_place_of_unfinished_work_loses_nothing_behind_it(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / ".unfinished").symlink_to(precious)
    trainer_in(run_dir, max_steps=1).train()
    assert [item.name for item in precious.iterdir()] == ["thesis.txt"]
    assert [item.name for item in run_dir.iterdir()] == ["checkpoint-1"]


def test_a_run_whose_checkpoints_are_a_link_is_not_resumed(tmp_path: Path) -> None:
    """Old checkpoints would be removed behind the link."""
    precious, run_dir = tmp_path / "precious", tmp_path / "run"
    (precious / "checkpoint-1").mkdir(parents=True)
    (precious / "checkpoint-1" / "thesis.txt").write_text("years")
    run_dir.mkdir()
    (run_dir / "run.toml").write_text("")
    (run_dir / "checkpoints").symlink_to(precious)
    with (
        pytest.raises(OutputError, match="checkpoints is a link to somewhere else"),
        claim_output_folder(run_dir, resume=True),
    ):
        pass
    assert (precious / "checkpoint-1" / "thesis.txt").is_file()


def test_files_that_grow_replace_a_link_and_do_not_write_through_it(tmp_path: Path) -> None:
    for name in ("progress.jsonl", "o.csv.partial"):
        (tmp_path / f"mine-{name}").write_text("mine")
        (tmp_path / name).symlink_to(tmp_path / f"mine-{name}")
    RunLog(tmp_path).write(step=1)
    with partial_output(tmp_path / "o.csv", {"model": "a"}, b"text,label\n"):
        pass
    for name in ("progress.jsonl", "o.csv.partial"):
        assert (tmp_path / f"mine-{name}").read_text() == "mine"
    assert (tmp_path / "progress.jsonl").read_text() == '{"step": 1}\n'
    assert (tmp_path / "o.csv").read_bytes() == b"text,label\n"
    assert not (tmp_path / "o.csv").is_symlink()


def test_a_best_checkpoint_that_lies_elsewhere_is_not_loaded(begun: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "checkpoint-1"
    shutil.copytree(begun / "checkpoint-1", elsewhere)
    checkpoint = begun / "checkpoint-2"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state |= {"best_model_checkpoint": str(elsewhere), "best_global_step": 7, "best_metric": 0.0}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    trainer = trainer_in(begun, max_steps=3, metric_for_best_model="loss", eval_strategy="steps",
                         eval_steps=1, load_best_model_at_end=True)  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint != str(elsewhere)


def test_the_result_replaces_a_link_and_does_not_write_through_it(
    by_plan: list[str], tmp_path: Path
) -> None:
    """The folder belonged to a run that was killed; somebody put links into it since."""
    out = tmp_path / "out"
    assert run([*by_plan, "--epochs", "1", "--quiet", "--output-dir", str(out)]) == 0
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("model.safetensors", "config.json", "summary.json", "report.html", "run.toml"):
        content = (out / name).read_bytes()
        (outside / name).write_bytes(content if name == "run.toml" else b"mine")
        (out / name).unlink()
        (out / name).symlink_to(outside / name)
    (out / "summary.json").unlink()  # it has not finished
    assert run(["train", "--resume", "--output-dir", str(out), "--quiet"]) == 0
    for name in ("model.safetensors", "config.json", "report.html"):
        assert not (out / name).is_symlink()
        assert (outside / name).read_bytes() == b"mine"
