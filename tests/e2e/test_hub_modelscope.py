"""ModelScope through its real client, against a server on localhost that speaks its HTTP API."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import Desk

from local_server import Fault
from memfit.models.modelscope import INSTALL
from modelscope_server import ModelScopeServer
from terminal import at_a_terminal

TOKEN = "ms-01234567-89ab-cdef-0123-456789abcdef"
MODEL = "modelscope:anna/reviews"
SOURCE = f"from memfit.models.hubs import source_of; print(source_of({MODEL!r}))"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sharing.md"
NAMES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def hub() -> Iterator[ModelScopeServer]:
    with ModelScopeServer() as server:
        server.users[TOKEN] = "anna"
        yield server


@pytest.fixture
def desk(hub: ModelScopeServer, tmp_path: Path) -> Desk:
    return Desk(hub, tmp_path / "home", TOKEN)


@pytest.fixture
def push(tiny_model_dir: Path, tmp_path: Path) -> tuple[str, ...]:
    """The command, with a folder that holds more than is to be uploaded."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "report.html").write_text("房間很髒", encoding="utf-8")
    return ("push", str(folder), "anna/reviews", "--to", "modelscope", "--licence", "cc-by-4.0")


def test_login_keeps_the_token_with_modelscopes_own(desk: Desk) -> None:
    wrong = desk("login", "--to", "modelscope", token=None, given="ms-wrong\n", code=2)
    assert wrong.endswith("ModelScope does not accept the token")
    assert "no token given" in desk("login", "--to", "modelscope", token=None, code=2)
    said = desk("login", "--to", "modelscope", token=None, given=f"{TOKEN}\n")
    assert said == f"logged in to {desk.hub.url} as anna"
    assert json.loads(desk("login", "--to", "modelscope", "--json", token=None))["user"] == "anna"
    kept = {item.name for item in (desk.home / "modelscope").rglob("*") if item.is_file()}
    assert "cookies" in kept
    assert TOKEN not in desk.said


def test_at_a_terminal_the_token_is_asked_for_and_not_shown(desk: Desk) -> None:
    command = [sys.executable, "-m", "memfit", "login", "--to", "modelscope"]
    env = {**os.environ, **desk.hub.environment(desk.home)}
    code, screen = at_a_terminal(command, [("token (not shown):", TOKEN)], env)
    assert code == 0, screen
    assert screen.strip().endswith("as anna")
    assert TOKEN not in screen
    code, screen = at_a_terminal(command, [], env)  # it is known now
    assert code == 0, screen
    assert "not shown" not in screen


def test_push_uploads_model_tokenizer_and_card(desk: Desk, push: tuple[str, ...]) -> None:
    assert "not logged in to ModelScope" in desk(*push, token=None, code=2)
    said = json.loads(desk(*push, "--private", "--json"))
    repo = desk.hub.repos["anna/reviews"]
    assert set(repo.files) == {*NAMES, "README.md"} == set(said["files"])
    assert said["url"] == f"{desk.hub.url}/models/anna/reviews"
    assert (repo.private, repo.licence) == (True, "cc-by-4.0")
    assert b"license: cc-by-4.0" in repo.files["README.md"]
    folder = Path(push[1])
    assert all(repo.files[name] == (folder / name).read_bytes() for name in NAMES)
    assert not list(folder.glob(".ms*"))  # the client leaves nothing in the folder
    assert TOKEN.encode() not in b"".join(repo.files.values())
    # Again: the weights are there already.
    desk(*push)
    assert len(desk.hub.asked("PUT", "/lfs/")) == 1
    assert TOKEN not in desk.said


def test_what_modelscope_refuses_says_what_to_do(desk: Desk, push: tuple[str, ...]) -> None:
    bob = [word.replace("anna/", "bob/") for word in push]
    assert "your token may not do that" in desk(*bob, code=2)
    assert "does not accept the token" in desk(*push, token="ms-wrong", code=2)
    desk(*push)
    assert "is public, so that nothing was uploaded" in desk(*push, "--private", code=2)
    assert "HF_HUB_OFFLINE=1" in desk(*push, code=2, HF_HUB_OFFLINE="1")


def test_an_upload_goes_on_when_the_connection_breaks(desk: Desk, push: tuple[str, ...]) -> None:
    desk.hub.faults += [
        Fault("PUT", "/lfs/", after_bytes=20_000),
        Fault("POST", "/commit/", status=503),
    ]
    desk(*push)
    repo = desk.hub.repos["anna/reviews"]
    assert repo.files["model.safetensors"] == (Path(push[1]) / "model.safetensors").read_bytes()


def test_the_pages_block_logs_in_pushes_and_trains_by_name(
    desk: Desk, tiny_model_dir: Path
) -> None:
    shutil.copytree(tiny_model_dir, desk.home / "run")
    rows = "\n".join(f"{index % 2},{'好壞'[index % 2]}房間{index}" for index in range(40))
    (desk.home / "reviews.csv").write_text(f"label,review\n{rows}\n", encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = (text for text in blocks if "memfit login --to modelscope" in text)
    assert block.startswith(f"{INSTALL}\n")
    for line in block.splitlines()[1:]:
        words = line.split()[1:]
        if words[0] == "train":
            # As a repository may be: weights of other frameworks are beside ours.
            other = {"pytorch_model.bin": b"old", "tf_model.h5": b"tf", "onnx/model.onnx": b"o"}
            desk.hub.repos["anna/reviews"].files |= other
            words += ["--max-steps", "1", "--max-length", "32", "--exact", "--use-cpu"]
        desk(*words, token=None, given=f"{TOKEN}\n" if words[0] == "login" else "")
    assert json.loads((desk.home / "more" / "summary.json").read_text())["model"] == MODEL
    fetched = {path.name for path in (desk.home / "ms").rglob("snapshots/master/*")}
    assert fetched == {*NAMES, "README.md"}


def test_a_download_goes_on_and_the_cache_serves_offline(desk: Desk, tiny_model_dir: Path) -> None:
    repo = desk.hub.add("anna/reviews", tiny_model_dir)
    repo.files["model.safetensors"] *= 30  # so that a piece of it is written before the cut
    desk.hub.faults.append(Fault("GET", "/repo$", after_bytes=2_500_000, times=5))
    found = Path(desk.python(SOURCE))
    assert (found / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    ranges = [item.headers.get("range") for item in desk.hub.asked("GET", "/repo$")]
    assert any(item is not None and item != "bytes=0-" for item in ranges)
    before = len(desk.hub.requests)
    assert Path(desk.python(SOURCE, HF_HUB_OFFLINE="1")) == found
    assert Path(desk.python(SOURCE, MODELSCOPE_ENDPOINT="http://127.0.0.1:9")) == found
    assert len(desk.hub.requests) == before


def test_a_model_modelscope_does_not_have_is_one_sentence(desk: Desk) -> None:
    refused = (
        "from memfit.errors import ModelError\nfrom memfit.models.hubs import source_of\n"
        f"try:\n    source_of({MODEL!r})\nexcept ModelError as error:\n    print(error)\n"
    )
    assert desk.python(refused).endswith("ModelScope has none of that name")
    off = desk.python(refused, HF_HUB_OFFLINE="1")
    assert "ModelScope is switched off (HF_HUB_OFFLINE=1), and it is not in the cache" in off
    gone = desk.python(refused, MODELSCOPE_ENDPOINT="http://127.0.0.1:9")
    assert "ModelScope cannot be reached (http://127.0.0.1:9), and it is not in the cache" in gone
