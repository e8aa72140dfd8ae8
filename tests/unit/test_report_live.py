"""The page that is served: fresh, only for this machine, gone at the end; and its questions."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from report_fixtures import Page, add_samples, make_run

from memfit.errors import OutputError
from memfit.run.inference import Classifier
from memfit.serve.live import HOST, LivePage, PageApp, RunModel, serve
from memfit.serve.server import bound_socket, served_in_thread
from memfit.serve.watching import watching


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def repeat(text: str, pair: str | None) -> dict[str, object]:
    return {"label": f"{text} / {pair}"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[LivePage, str, Clock]]:
    clock = Clock()
    page = LivePage(tmp_path, "en", clock, trial=repeat)
    app = PageApp(page)
    with served_in_thread(app, bound_socket(HOST, 0)) as url:
        yield page, url + app.path, clock


def ask(url: str, **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    connection.request("GET", parts.path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, body


def post(url: str, body: bytes = b'{"text": "x"}', **changed: str | None) -> tuple[int, str]:
    """Asks as the page's script does, but for what is `changed`."""
    parts = urlsplit(url)
    headers = {
        "Host": parts.netloc, "Origin": f"http://{parts.netloc}", "Sec-Fetch-Site": "same-origin",
        "Content-Type": "application/json", "Content-Length": str(len(body)),
    }  # fmt: skip
    headers |= {name.replace("_", "-"): value for name, value in changed.items()}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    connection.putrequest("POST", parts.path, skip_host=True)
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, said


def test_the_page_asks_and_gets_an_answer(served: tuple[LivePage, str, Clock]) -> None:
    page, url, _ = served
    add_samples(page.folder, steps=3)
    found = Page(ask(url)[2])
    assert found.values("form", "id") == ["trial"]
    assert found.tags.count("textarea") == 1
    sent = '{"text": "房間很髒", "text_pair": "<b>"}'.encode()
    status, said = post(url, sent)
    assert (status, json.loads(said)) == (200, {"label": "房間很髒 / <b>"})


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": "100001"}, 413),
        ({"Content_Length": None}, 400),
        ({"body": b"[1]"}, 400),
        ({"body": b'{"text": 3}'}, 400),
        ({"body": b"{"}, 400),
    ],
)
def test_only_the_page_itself_may_ask(
    served: tuple[LivePage, str, Clock], changed: dict[str, Any], status: int
) -> None:
    assert post(served[1], **changed) == (status, "")
    assert post(served[1].rstrip("/") + "x/")[0] == 404


def test_a_page_without_a_model_takes_no_questions(tmp_path: Path) -> None:
    add_samples(tmp_path, steps=3)
    app = PageApp(LivePage(tmp_path, "en"))
    with served_in_thread(app, bound_socket(HOST, 0)) as url:
        assert "trial" not in Page(ask(url + app.path)[2]).values("form", "id")
        assert post(url + app.path)[0] == 405


def test_the_newest_checkpoint_answers_until_there_is_a_model(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    model = RunModel(tmp_path, "en", "cpu")
    assert "no checkpoint has been written" in model("好", None)["error"]
    for step in (5, 10):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        shutil.copytree(tiny_model_dir, folder)
        (folder / "trainer_state.json").write_text("{}")
    expected = Classifier.load(tiny_model_dir, device="cpu").predict("服務")[0]
    said = model("服務", None)
    assert (said["label"], said["by"]) == (expected.label, "by checkpoint-10")
    assert [one["name"] for one in said["scores"]] == sorted(
        expected.scores, key=lambda name: -expected.scores[name]
    )
    assert said["scores"][0]["value"] == pytest.approx(max(expected.scores.values()))
    shutil.copytree(tiny_model_dir, tmp_path, dirs_exist_ok=True)
    make_run(tmp_path)
    assert model("服務", None)["by"] == ""
    assert "trained on single texts" in model("服務", "很好")["error"]


def test_a_folder_without_a_run_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"no summary\.json"):
        serve(tmp_path, None, lambda _: pytest.fail("it was served"))


def test_it_waits_for_the_run_and_then_follows_it(served: tuple[LivePage, str, Clock]) -> None:
    page, url, clock = served
    status, headers, body = ask(url)
    assert status == 200
    assert "The run is getting ready" in body
    assert headers["Cache-Control"] == "no-store"
    log = add_samples(page.folder, steps=3)
    tag = headers["ETag"]
    assert ask(url, **{"If-None-Match": tag})[0] == 304  # drawn a moment ago
    clock.now += 2
    status, headers, body = ask(url, **{"If-None-Match": tag})
    assert status == 200
    assert "step 3 of 438" in Page(body).words
    assert ask(url, **{"If-None-Match": headers["ETag"]})[0] == 304
    log.write(step=9, seconds=4.0, now_bytes=1, peak_bytes=2)
    clock.now += 2
    assert "step 9 of 438" in Page(ask(url)[2]).words


def test_a_page_that_takes_long_to_draw_is_drawn_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    page = LivePage(tmp_path, "en", clock)

    def draw(**_: bool) -> str:
        clock.now += 3.0
        return str(clock.now)

    monkeypatch.setattr(page, "_draw", draw)
    first = page.read()
    log = add_samples(tmp_path, steps=1)
    clock.now += 20.0
    assert page.read() == first  # ten times as long as it takes
    clock.now += 10.0
    assert page.read() != first
    log.write(step=2)
    page.ended = True
    assert page.read()[1] == b"139.0"  # the end waits for nothing


def test_an_unchanged_folder_is_not_drawn_again(
    served: tuple[LivePage, str, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, url, clock = served
    add_samples(page.folder, steps=3)
    first = ask(url)[2]
    monkeypatch.setattr(page, "_draw", lambda **_: "drawn again")
    clock.now += 60
    assert ask(url)[2] == first


def test_the_end_is_shown_at_once_and_ends_the_asking(
    served: tuple[LivePage, str, Clock],
) -> None:
    page, url, _ = served
    add_samples(page.folder, steps=3)
    assert 'data-refresh="2000"' in ask(url)[2]
    assert page.watched_lately()
    assert not page.last_seen
    make_run(page.folder)
    page.ended = True
    wait_for_answers(page)
    with page.answering():
        page.read()
        assert not page.last_seen  # it is not sent yet, and the server must not end
        assert page.answers == 1
    assert page.last_seen
    page.last_seen = False
    assert "data-refresh=" not in ask(url)[2]
    wait_for_answers(page)
    assert page.last_seen


def wait_for_answers(page: LivePage) -> None:
    """A browser may have the whole page before the server knows that it was sent."""
    deadline = time.monotonic() + 10
    while page.answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert page.answers == 0


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1"],
)
def test_a_page_of_another_name_gets_nothing(
    served: tuple[LivePage, str, Clock], host: str
) -> None:
    status, _, body = ask(served[1], Host=host)
    assert (status, body) == (403, "")


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST", "[::1]:80"])
def test_names_of_this_machine_are_answered_at_any_forwarded_port(
    served: tuple[LivePage, str, Clock], host: str
) -> None:
    assert ask(served[1], Host=host)[0] == 200


def test_without_the_secret_word_there_is_nothing(served: tuple[LivePage, str, Clock]) -> None:
    parts = urlsplit(served[1])
    assert len(parts.path) > 16
    assert parts.hostname == "127.0.0.1"
    for path in ("/", "/favicon.ico", parts.path[:-2], parts.path + "run.toml"):
        assert ask(f"http://{parts.netloc}{path}")[0] == 404


def test_a_process_of_its_own_serves_until_the_run_ends(tmp_path: Path) -> None:
    said: list[str] = []
    add_samples(tmp_path, steps=3)
    with watching(tmp_path, said.append, "zh"):
        (line,) = said
        url = line.removeprefix("watch    ")
        assert "第 3 步，共 438 步" in Page(ask(url)[2]).words
        make_run(tmp_path)
        seen: list[str] = []
        browser = threading.Thread(target=_poll, args=(url, seen))
        browser.start()
        while not seen and browser.is_alive():  # on a busy machine the run would end first
            time.sleep(0.01)
    browser.join()
    assert "已完成" in seen[-1]
    with pytest.raises(OSError, match="refused"):
        ask(url)


def _poll(url: str, seen: list[str]) -> None:
    """What the page's script does."""
    for _ in range(200):
        try:
            seen.append(Page(ask(url)[2]).words)
        except (OSError, http.client.HTTPException):
            return
        if "已完成" in seen[-1]:
            return
        time.sleep(0.05)


@pytest.mark.skipif(os.name == "nt", reason="signals are sent as on POSIX")
def test_ctrl_c_is_for_the_training_and_a_dead_parent_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "memfit.serve.live", str(tmp_path)]
    command += ["--linger-seconds", "0.5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        process.send_signal(signal.SIGINT)
        assert ask(url)[0] == 200
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("executable", ["false", "", "/nowhere/python"])
def test_a_server_that_cannot_start_costs_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    said: list[str] = []
    with watching(tmp_path, said.append, "en"):
        pass
    assert "the live page could not be started" in said[0]


def test_the_server_starts_without_torch() -> None:
    code = (
        "import sys, memfit.serve.live, memfit.report.page;"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
