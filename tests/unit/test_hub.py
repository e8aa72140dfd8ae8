"""What is checked before a hub is asked, what never leaves, and a hub that is silent."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import memfit
from memfit.config import ModelConfig, RunConfig
from memfit.errors import ConfigError, ModelError
from memfit.models import hubs, huggingface, modelscope
from memfit.models.hubs import Upload
from memfit.models.loading import load_config
from memfit.records.results import RunSummary, write_summary
from memfit.report.model_card import LICENCES, checked_licence
from memfit.run import publish
from memfit.run.publish import files_to_push

TOKEN = "hf_" + "aB3dE6gH" * 4
ODD_TOKEN = "my-own-hubs-token-1"


@pytest.fixture(autouse=True)
def _nothing_found_yet() -> Iterator[None]:
    hubs._found.cache_clear()
    yield
    hubs._found.cache_clear()


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A result folder with everything a run leaves in it."""
    path = tmp_path / "run"
    shutil.copytree(tiny_model_dir, path)
    private = ("run.toml", "summary.json", "evaluation.json", "report.html", "trainer_state.json",
               "training_args.bin", "optimizer.pt", "README.md", ".env")  # fmt: skip
    for name in private:
        (path / name).write_text("{}")
    (path / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (path / "checkpoints" / "checkpoint-1" / "model.safetensors").touch()
    return path


# ---- what is given ----


@pytest.mark.parametrize("repo", ["reviews", "a/b/c", "/b", "a/", "a b/c", "a/評論", "a/b?c"])
def test_a_repository_is_user_and_name(repo: str) -> None:
    with pytest.raises(ConfigError, match="the repository"):
        publish.check_repo(repo)


def test_another_hub_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--to is 'model-scope'.* Did you mean 'modelscope'\?"):
        memfit.push("run", "anna/reviews", to="model-scope")


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("apache-2.0", "apache-2.0"),
        ("MIT", "mit"),
        ("CC BY 4.0", "cc-by-4.0"),
        (" other ", "other"),
    ],
)
def test_a_licence_is_taken_as_people_write_it(given: str, known: str) -> None:
    assert checked_licence(given) == known
    assert known in LICENCES


def test_a_licence_nobody_knows_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--licence is 'apache2'.*Did you mean 'apache-2.0'\?"):
        checked_licence("apache2")
    for nothing in (None, " "):
        with pytest.raises(ConfigError, match=r"name one with --licence"):
            checked_licence(nothing)


# ---- which files leave the folder ----


def test_only_the_model_and_its_tokenizer_leave_the_folder(folder: Path) -> None:
    names = {file.name for file in files_to_push(folder)}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_exported_files_go_along_under_their_own_path(folder: Path) -> None:
    (folder / "onnx").mkdir()
    for name in ("model.onnx", "model_int8.onnx", "model.onnx.data", "notes.txt"):
        (folder / "onnx" / name).touch()
    upload = hubs.Upload(
        repo="anna/reviews",
        folder=folder,
        files=files_to_push(folder),
        card=b"",
        licence="mit",
        private=False,
    )
    sent = {name for name in upload.names if "/" in name}
    assert sent == {"onnx/model.onnx", "onnx/model_int8.onnx", "onnx/model.onnx.data"}


def test_pickled_weights_stay_where_safetensors_are_there(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" not in {file.name for file in files_to_push(folder)}
    (folder / "model.safetensors").unlink()
    assert "pytorch_model.bin" in {file.name for file in files_to_push(folder)}


def test_a_folder_that_is_no_model_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        files_to_push(tmp_path / "nowhere")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.*tokenizer\.save_pretrained"):
        files_to_push(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has not finished; continue it with .*--resume"):
        files_to_push(folder)


# ---- tokens ----


@pytest.mark.parametrize("token", [TOKEN, ODD_TOKEN])
def test_no_token_is_in_what_is_said_of_an_error(token: str) -> None:
    error = ValueError(f"Illegal header value b'Bearer {token}'.\nsecond line")
    said = hubs.reason(error, token)
    assert token not in said
    assert said in ("Illegal header value b'Bearer …'", "Illegal header value b'Bearer hf_…'")


@pytest.mark.parametrize("token", [TOKEN, ODD_TOKEN])
def test_no_token_is_in_an_error_of_either_hub(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", token)
    asked = hubs.explained(lambda error: huggingface._sentence(error, "upload", "", token))
    for explained in (asked, modelscope._explained("upload", token)):
        with pytest.raises(memfit.MemfitError) as caught, explained:
            raise RuntimeError(f"failed with {token}")
        assert token not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_no_token_is_in_the_files_of_a_run_or_in_the_card(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.build(data="a.csv", model=f"https://anna:{TOKEN}@hub/x", hub_token=TOKEN)
    assert "hub/x" in config.to_toml()
    assert TOKEN not in config.to_toml()
    leaky = RunSummary(model="m", task="single_label", labels=(f"label {TOKEN}",))
    written = write_summary(folder, leaky).read_text(encoding="utf-8")
    assert "label hf_…" in written
    assert TOKEN not in written
    (folder / "README.md").write_text(f"---\nlicense: mit\n---\nMine, {TOKEN}", encoding="utf-8")
    uploads: list[Upload] = []
    monkeypatch.setattr(huggingface, "upload", lambda what: uploads.append(what) or "url")
    memfit.push(folder, "anna/reviews")
    assert b"Mine, hf_" in uploads[0].card
    assert TOKEN.encode() not in uploads[0].card


# ---- a hub that does not answer ----


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cached(cache: Path, name: str, files: Path, *which: str) -> None:
    """A model in the hub's cache, as a download leaves it."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for file in which:
        shutil.copy(files / file, snapshot)


@pytest.mark.usefixtures("empty_cache")
def test_offline_a_model_that_is_not_cached_is_said_at_once() -> None:
    started = time.perf_counter()
    with pytest.raises(ModelError, match=r"is switched off \(HF_HUB_OFFLINE=1\); nor is it in"):
        load_config(ModelConfig(model="bert-base-nowhere"))
    assert time.perf_counter() - started < 5


@pytest.mark.usefixtures("empty_cache")
def test_without_a_network_a_bare_name_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}")  # fmt: skip
    started = time.perf_counter()
    with pytest.raises(
        ModelError, match=r"bert-base-nowhere: .* the hub cannot be reached"
    ) as raised:
        load_config(ModelConfig(model="bert-base-nowhere"))
    assert "HF_ENDPOINT=https://hf-mirror.com" in str(raised.value)
    assert "modelscope:org/name" in str(raised.value)
    assert time.perf_counter() - started < 5


def test_offline_the_cache_is_read(empty_cache: Path, tiny_model_dir: Path) -> None:
    cached(empty_cache, "anna/reviews", tiny_model_dir, "config.json")
    assert load_config(ModelConfig(model="anna/reviews")).id2label == {0: "負評", 1: "正評"}
    source = hubs.source_of("anna/reviews")
    assert Path(source, "config.json").is_file()


def test_offline_a_model_that_is_partly_cached_says_so(
    empty_cache: Path, tiny_model_dir: Path
) -> None:
    cached(empty_cache, "anna/reviews", tiny_model_dir, "config.json")
    with pytest.raises(ModelError, match=r"the cache holds only parts of it, and the hub is switc"):
        memfit.load("anna/reviews")


def test_a_folder_asks_no_hub(tiny_model_dir: Path) -> None:
    assert hubs.source_of(str(tiny_model_dir)) == str(tiny_model_dir)


# ---- ModelScope without its client ----


def test_a_modelscope_name_without_the_client_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r'not installed: pip install "memfit\[modelscope\]"'):
        load_config(ModelConfig(model="modelscope:anna/reviews"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(ConfigError, match=r'pip install "memfit\[modelscope\]"'):
        hubs.login("modelscope")


def test_a_modelscope_name_has_an_owner() -> None:
    with pytest.raises(ModelError, match="not of the form modelscope:org/name"):
        load_config(ModelConfig(model="modelscope:reviews"))
