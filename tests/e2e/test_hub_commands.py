"""Push, login and download against a server that speaks the hub's protocol over HTTP.

huggingface_hub reads its endpoint when it is imported, so every command is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import Desk

from hub_server import HubServer
from local_server import Fault
from memfit.records.evaluation import ClassRow, Evaluation, Mistake
from memfit.records.results import RunSummary, write_evaluation, write_summary
from terminal import at_a_terminal

TOKEN = "hf_" + "aB3dE6gH" * 4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sharing.md"
SENTENCE = "服务人员都很亲切"
SECRET_TEXT = "房間很髒，電話是0912345678"
LOAD = f"import memfit; print(memfit.load('anna/reviews').predict({SENTENCE!r})[0].label)"
SOURCE = "from memfit.models.hubs import source_of; print(source_of('anna/reviews'))"
# What a training does, without torch: memfit finds the model, transformers asks huggingface_hub.
FETCH = """
from huggingface_hub import hf_hub_download
from memfit.models.hubs import source_of
print(hf_hub_download(source_of('anna/reviews'), 'model.safetensors'))
"""
# The command, with shorter waits for a connection that comes back.
IMPATIENT = """
from memfit.cli import main
from memfit.models import huggingface
huggingface.DOWNLOAD_WAITS_SECONDS = (0.01, 0.01, 0.01)
main()
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.users[TOKEN] = "anna"
        yield server


@pytest.fixture
def run_folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """What a finished run leaves, texts included."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_model_dir, folder)
    summary = RunSummary(model=str(folder), task="single_label", labels=("負評", "正評"))
    write_summary(folder, summary)
    wrong = (Mistake(SECRET_TEXT, "負評", "正評", 0.99),)
    rows = (ClassRow("負評", 0.8, 0.7, 0.75, 3),)
    write_evaluation(folder, Evaluation("single_label", 3, {}, classes=rows), wrong)
    (folder / "report.html").write_text(SECRET_TEXT, encoding="utf-8")
    return folder


@pytest.fixture
def desk(hub: HubServer, tmp_path: Path) -> Desk:
    return Desk(hub, tmp_path / "home", TOKEN)


def kept_tokens(home: Path) -> set[str]:
    """Files under a home folder that hold the token."""
    return {
        path.name
        for path in home.rglob("*")
        if path.is_file() and TOKEN.encode() in path.read_bytes()
    }


# ---- login ----


def test_a_token_in_a_pipe_logs_in_and_is_kept_by_the_hubs_client_only(desk: Desk) -> None:
    assert desk("login", token=None, given=f"{TOKEN}\n") == f"logged in to {desk.hub.url} as anna"
    assert json.loads(desk("login", "--json", token=None)) == {"hub": desk.hub.url, "user": "anna"}
    assert kept_tokens(desk.home) == {"token", "stored_tokens"}
    assert TOKEN not in desk.said


def test_without_a_token_the_browser_confirms_the_login(desk: Desk) -> None:
    assert desk("login", token=None).endswith("as anna")
    assert "ABCD-1234" in desk.said  # the code to confirm
    assert len(desk.hub.asked("POST", "/oauth/token")) == 2  # pending, then confirmed
    assert kept_tokens(desk.home) == {"token", "stored_tokens"}
    assert TOKEN not in desk.said


def test_a_wrong_token_is_refused_and_not_repeated(desk: Desk) -> None:
    wrong = "hf_" + "0Wrong00" * 4
    said = desk("login", token=None, given=wrong, code=2)
    assert said == "memfit: cannot log in: the hub does not accept the token"
    assert wrong not in desk.said


# ---- push ----


def test_push_uploads_model_tokenizer_and_card_in_one_commit(desk: Desk, run_folder: Path) -> None:
    said = json.loads(desk("push", str(run_folder), "anna/reviews", "--licence", "mit", "--json"))
    repo = desk.hub.repos["anna/reviews"]
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(repo.files) == {*names, "README.md"} == set(said["files"])
    assert said["url"] == f"{desk.hub.url}/anna/reviews"
    assert said["uploaded_bytes"] == sum(map(len, repo.files.values()))
    assert len(repo.commits) == 1
    assert not repo.private
    for name in names:
        assert repo.files[name] == (run_folder / name).read_bytes()
    uploaded = b"".join(repo.files.values())
    for never in (SECRET_TEXT, TOKEN, str(run_folder)):
        assert never.encode() not in uploaded
    assert TOKEN not in desk.said
    assert not (run_folder / "README.md").exists()
    # The same again changes nothing, and sends the weights no second time.
    desk("push", str(run_folder), "anna/reviews", "--licence", "mit")
    assert len(repo.commits) == 1
    assert len(desk.hub.asked("PUT", "/lfs/")) == 1


def test_a_private_push_never_lands_in_a_public_repository(desk: Desk, run_folder: Path) -> None:
    words = ("push", str(run_folder), "anna/secret", "--licence", "other", "--private")
    desk(*words)
    assert desk.hub.repos["anna/secret"].private
    desk.hub.repos["anna/secret"].private = False
    commits = list(desk.hub.repos["anna/secret"].commits)
    (run_folder / "config.json").write_text((run_folder / "config.json").read_text() + "\n")
    assert "is public, so that nothing was uploaded" in desk(*words, code=2)
    assert desk.hub.repos["anna/secret"].commits == commits


def test_in_a_pipe_a_missing_licence_names_the_option(desk: Desk, run_folder: Path) -> None:
    said = desk("push", str(run_folder), "anna/reviews", code=2)
    assert said.startswith("memfit: no licence given; name one with --licence")
    assert desk.hub.requests == []


def test_at_a_terminal_the_licence_is_asked_for(desk: Desk, run_folder: Path) -> None:
    command = [sys.executable, "-m", "memfit", "push", str(run_folder), "anna/reviews"]
    answers = [
        ("licence: ", "apache2"), ("licence: ", "apache-2.0"),
        ("intended use (Enter leaves it to fill in): ", "Hotel reviews."),
        ("limitations (Enter leaves it to fill in): ", ""),
    ]  # fmt: skip
    code, screen = at_a_terminal(command, answers, desk.environment(TOKEN))
    assert code == 0, screen
    assert "Did you mean 'apache-2.0'?" in screen
    card = desk.hub.repos["anna/reviews"].files["README.md"].decode()
    assert "license: apache-2.0" in card
    assert "## Intended use\n\nHotel reviews.\n" in card
    assert "*To be filled in: what it must not be used for" in card
    # A card that names one needs no question.
    (run_folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n", encoding="utf-8")
    code, screen = at_a_terminal(command, [], desk.environment(TOKEN))
    assert code == 0, screen
    assert b"Mine." in desk.hub.repos["anna/reviews"].files["README.md"]


def test_the_licence_is_asked_for_and_the_card_written_in_chinese(
    desk: Desk, run_folder: Path
) -> None:
    command = [sys.executable, "-m", "memfit", "--lang", "zh", "push", str(run_folder)]
    answers = [
        ("许可证: ", "apache2"), ("许可证: ", "apache-2.0"),
        ("适用范围（按回车留待填写）: ", ""), ("局限（按回车留待填写）: ", ""),
    ]  # fmt: skip
    code, screen = at_a_terminal(
        [*command, "anna/reviews"], answers, desk.environment(TOKEN, PYTHONUTF8="1")
    )
    assert code == 0, screen
    assert "别人可以按哪种许可证使用这个模型？" in screen
    assert "你是不是要写 'apache-2.0'？" in screen
    assert "已上传 " in screen
    card = desk.hub.repos["anna/reviews"].files["README.md"].decode()
    assert "license: apache-2.0\n" in card
    assert "\n## 结果\n" in card


def test_what_the_hub_refuses_says_what_to_do(desk: Desk, run_folder: Path) -> None:
    words = ("push", str(run_folder), "bob/reviews", "--licence", "mit")
    assert "the hub knows no token; log in with memfit login" in desk(*words, token=None, code=2)
    assert "the token may not write there" in desk(*words, code=2)
    wrong = "hf_" + "0Wrong00" * 4
    assert "does not accept the token" in desk(*words, token=wrong, code=2)
    assert "HF_HUB_OFFLINE=1" in desk(*words, code=2, HF_HUB_OFFLINE="1")
    gone = desk(*words, code=1, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the connection to http://127.0.0.1:9 failed; the same command goes on" in gone
    assert TOKEN not in desk.said
    assert wrong not in desk.said


def test_a_token_that_no_header_can_carry_is_not_repeated(desk: Desk, run_folder: Path) -> None:
    odd = "hf_Schlüssel" + "x" * 20
    desk("push", str(run_folder), "anna/reviews", "--licence", "mit", token=odd, code=1)
    assert odd not in desk.said


def test_a_hub_without_xet_storage_is_uploaded_to_the_older_way(
    desk: Desk, run_folder: Path
) -> None:
    desk("push", str(run_folder), "anna/reviews", "--licence", "mit", HF_HUB_DISABLE_XET="0")
    assert len(desk.hub.asked("GET", "xet-write-token")) >= 1
    assert "model.safetensors" in desk.hub.repos["anna/reviews"].files


def test_an_upload_goes_on_when_the_connection_breaks(desk: Desk, run_folder: Path) -> None:
    desk.hub.faults += [
        Fault("PUT", "/lfs/", after_bytes=20_000),
        Fault("POST", "/commit/", status=503),
    ]
    desk("push", str(run_folder), "anna/reviews", "--licence", "mit")
    repo = desk.hub.repos["anna/reviews"]
    weights = (run_folder / "model.safetensors").read_bytes()
    assert repo.files["model.safetensors"] == weights
    assert len(repo.commits) == 1
    assert len(desk.hub.asked("PUT", "/lfs/")) == 1  # the one that came through
    assert len(desk.hub.asked("POST", "/commit/")) == 2


def test_an_upload_that_was_killed_sends_what_arrived_no_second_time(
    desk: Desk, run_folder: Path, tiny_model_dir: Path
) -> None:
    from transformers import BertForSequenceClassification

    (run_folder / "model.safetensors").unlink()
    model = BertForSequenceClassification.from_pretrained(tiny_model_dir)
    model.save_pretrained(run_folder, max_shard_size="60KB")
    shards = sorted(run_folder.glob("model-*.safetensors"))
    assert len(shards) >= 2
    words = ["push", str(run_folder), "anna/reviews", "--licence", "mit"]
    desk.hub.faults.append(Fault("POST", "/commit/", status=503, times=99))
    with subprocess.Popen(
        [sys.executable, "-m", "memfit", *words], env=desk.environment(TOKEN),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while not desk.hub.asked("POST", "/commit/") and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert len(desk.hub.asked("PUT", "/lfs/")) == len(shards)
    assert desk.hub.repos["anna/reviews"].commits == []  # nobody has seen half a model
    desk.hub.faults.clear()
    desk(*words)
    assert len(desk.hub.asked("PUT", "/lfs/")) == len(shards)
    files = desk.hub.repos["anna/reviews"].files
    assert all(files[shard.name] == shard.read_bytes() for shard in shards)


# ---- download ----


@pytest.fixture(scope="module")
def larger_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 MB of weights: more than one chunk of a download."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("larger") / "model"
    shutil.copytree(tiny_model_dir, folder)
    config = BertConfig.from_pretrained(tiny_model_dir, vocab_size=125_000)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def weights_asked_for(hub: HubServer, since: int) -> list[str | None]:
    """The ranges of the requests for the weights."""
    return [
        request.headers.get("range")
        for request in hub.requests[since:]
        if request.method == "GET" and request.path.endswith("model.safetensors")
    ]


def test_a_download_that_was_cut_off_goes_on_in_the_next_process(
    desk: Desk, larger_model: Path
) -> None:
    repo = desk.hub.add("anna/reviews", larger_model)
    assert len(repo.files["model.safetensors"]) > 12_000_000
    # Broken once in the middle, and then nothing comes any more.
    desk.hub.faults += [
        Fault("GET", "model.safetensors", after_bytes=6_000_000),
        Fault("GET", "model.safetensors", times=99),
    ]
    said = desk.run("-c", IMPATIENT, "predict", "anna/reviews", SENTENCE, token=TOKEN, code=2)
    assert re.search(r"the download of anna/reviews stopped: .* 5\.0 MiB of model", said)
    assert said.endswith("the same command goes on there")
    desk.hub.faults.clear()
    before = len(desk.hub.requests)
    whole = Path(desk.python(FETCH))
    assert whole.read_bytes() == repo.files["model.safetensors"]
    assert weights_asked_for(desk.hub, before) == [f"bytes={5 * 2**20}-"]
    assert list((desk.home / "hf").rglob("*incomplete")) == []


def test_a_damaged_leftover_is_found_out_and_fetched_anew(desk: Desk, larger_model: Path) -> None:
    repo = desk.hub.add("anna/reviews", larger_model)
    weights = repo.files["model.safetensors"]
    blobs = desk.home / "hf" / "hub" / "models--anna--reviews" / "blobs"
    blobs.mkdir(parents=True)
    leftover = blobs / f"{hashlib.sha256(weights).hexdigest()}.memfit.incomplete"
    leftover.write_bytes(b"x" * 4_000_000)
    assert Path(desk.python(FETCH)).read_bytes() == weights
    assert weights_asked_for(desk.hub, 0) == ["bytes=4000000-", None]
    assert not leftover.exists()


def test_the_token_is_not_sent_to_the_store_a_large_file_lies_in(
    desk: Desk, larger_model: Path
) -> None:
    desk.hub.add("anna/reviews", larger_model, private=True)
    with HubServer() as store:
        store.repos = desk.hub.repos
        store.open_to_all = True
        desk.hub.store_url = store.url
        desk.python(FETCH, token=TOKEN)
        assert len(store.asked("GET", "model.safetensors")) == 1
        assert all("authorization" not in request.headers for request in store.requests)
    assert all("authorization" in request.headers for request in desk.hub.asked("GET", "/api/"))


# ---- the page ----


def test_the_pages_push_runs_as_it_is_written_and_then_the_cache_without_the_hub(
    desk: Desk, run_folder: Path
) -> None:
    shutil.copytree(run_folder, desk.home / "run")
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = (text for text in blocks if text.startswith("memfit login\n"))
    for line in block.splitlines():
        shown = desk(*line.split()[1:], token=None, given=f"{TOKEN}\n" if "login" in line else "")
    assert SENTENCE in shown  # of the model in the hub, which is a mirror: HF_ENDPOINT names it
    assert TOKEN not in desk.said
    before = len(desk.hub.requests)
    label = desk.python(LOAD, HF_HUB_OFFLINE="1")
    assert label in ("負評", "正評")
    assert label in shown
    started = time.monotonic()
    found = Path(desk.python(SOURCE, HF_ENDPOINT="http://127.0.0.1:9"))
    # huggingface_hub alone asks for half a minute, and again
    assert time.monotonic() - started < 15
    assert (found / "model.safetensors").is_file()
    assert len(desk.hub.requests) == before
