"""The report of a real run in a real browser: by day, by night, on a phone, on paper, and live."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser as browsers
import pytest
from browser import Browser
from transformers import TrainerCallback

import memfit
from memfit.i18n import speaking
from memfit.records.run_log import RunLog
from memfit.report.page import write_report
from memfit.serve import live
from memfit.serve.live import HOST, LivePage, PageApp, RunModel
from memfit.serve.server import bound_socket, served_in_thread

pytestmark = pytest.mark.skipif(
    browsers.find() is None, reason="no Chromium on this machine to look at pages with"
)

PRAISE = ("服務人員都很親切", "房間很乾淨，床也很舒服，下次還會再來", "位置方便，早餐好吃")
BLAME = ("服務人員都不親切", "房間很髒，空調太吵，再也不會來了", "位置偏僻，早餐難吃，價格還很貴")
LOOKS = {
    "light": {"width": 1280, "height": 900},
    "dark": {"width": 1280, "height": 900, "dark": True},
    "phone": {"width": 390, "height": 844},
    "phone-dark": {"width": 390, "height": 844, "dark": True},
}

# Every visible text with its colour over what is behind it, and the size it is seen at.
TEXTS = """
(() => {
  const parse = (colour) => {
    const found = (colour.match(/[\\d.]+/g) || []).map(Number);
    return found.length < 3 ? [0, 0, 0, 0] : [...found.slice(0, 3), found[3] ?? 1];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((ground, layer) => over(layer, ground), [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const seen = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest("script, style, option")) continue;
    const style = getComputedStyle(element);
    const svg = element.closest("svg");
    const ground = behind(svg ? svg.parentElement : element);
    const ink = over(parse(svg ? style.fill : style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    const size = parseFloat(style.fontSize) * scale;
    seen.push({ text, size, contrast: (a + 0.05) / (b + 0.05) });
  }
  return seen;
})()
"""


@pytest.fixture(scope="module")
def trained(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run on Chinese texts, with a plan and an adjustment beside it."""
    folder = tmp_path_factory.mktemp("browser")
    rows = ["label,review"]
    rows += [f'{n % 2},"{(BLAME, PRAISE)[n % 2][n // 2 % 3]}{"床" * (n % 9)}"' for n in range(120)]
    (folder / "reviews.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    memfit.finetune(
        folder / "reviews.csv", model=tiny_model_dir, output_dir=folder / "run", budget="1GB",
        batch_size=8, max_steps=24, max_length=32, learning_rate=1e-3, logging_steps=1,
        eval_strategy="steps", eval_steps=8, label_names={"0": "負評", "1": "正評"}, quiet=True,
        exact=True,
    )  # fmt: skip
    run = folder / "run"
    plan = (
        'fidelity = "exact"\n[micro_batching]\nmax_tokens = 2048\n[strategies]\npacking = {}\n'
        'checkpointing = {layers = 1, part = "layer"}\n[predicted]\nstep_seconds = 0.02\n'
        '[reasons]\npacking = "文本紧密拼接，不做填充；否则每个批次有 41 % 是填充"\n'
        'checkpointing = "重计算 2 层中的 1 层：省 0.2 MiB，使每步慢 12 %"\n'
        'memory = "峰值 12.0 MiB，预算 1.00 GB，出现在训练时"\n'
    )
    (run / "plan.toml").write_text(plan, encoding="utf-8")
    adjusted = {
        "step": 12, "seconds": 3.0, "why": "显存不足", "from": "whole batches", "to": "64 tokens",
    }  # fmt: skip
    (run / "adjustments.jsonl").write_text(json.dumps(adjusted) + "\n", encoding="utf-8")
    return run


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(trained: Path) -> dict[str, Path]:
    """The report by its language."""
    return {
        lang: write_report(trained, lang=lang).rename(trained / f"report-{lang}.html")
        for lang in ("en", "zh")
    }


@pytest.fixture
def url(pages: dict[str, Path]) -> str:
    return pages["zh"].as_uri()


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_all_of_it_can_be_read(
    chromium: Browser, pages: dict[str, Path], tmp_path: Path, look: str, lang: str
) -> None:
    path = pages[lang]
    assert path.stat().st_size < 2_000_000
    chromium.look_like(**LOOKS[look])
    chromium.open(path.as_uri())
    assert chromium.messages == []
    width = chromium.run("document.documentElement.scrollWidth")
    assert width <= LOOKS[look]["width"], "the page scrolls sideways"
    texts: list[dict[str, Any]] = chromium.run(TEXTS)
    assert len(texts) > 150
    assert any("服務" in item["text"] or "房間" in item["text"] for item in texts)
    faint = [item for item in texts if item["contrast"] < 4.5]
    assert faint == []
    small = [item for item in texts if item["size"] < 11]
    assert small == []
    shot = chromium.screenshot(tmp_path / f"{look}-{lang}.png")
    assert shot.stat().st_size > 50_000


def test_day_and_night_can_be_chosen_by_keyboard_and_are_remembered(
    chromium: Browser, url: str
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    chromium.look_like(1280, 900)
    chromium.open(url)
    assert chromium.run(paper) == "rgb(255, 255, 255)"
    chromium.run("document.getElementById('theme').focus()")
    chromium.press("ArrowDown", windowsVirtualKeyCode=40)
    chromium.press("ArrowDown", windowsVirtualKeyCode=40)
    assert chromium.run("document.getElementById('theme').value") == "dark"
    assert chromium.run(paper) == "rgb(20, 24, 29)"
    assert [item for item in chromium.run(TEXTS) if item["contrast"] < 4.5] == []
    chromium.open(url)
    assert chromium.run(paper) == "rgb(20, 24, 29)"
    chromium.run("localStorage.clear()")
    chromium.look_like(1280, 900, dark=True, on_paper=True)
    chromium.open(url)
    assert chromium.run(paper) == "rgb(255, 255, 255)"  # ink is for paper
    assert chromium.messages == []


def test_the_keyboard_reaches_the_content_and_everything_that_scrolls(
    chromium: Browser, url: str
) -> None:
    chromium.look_like(390, 844)
    chromium.open(url)
    tab = {"windowsVirtualKeyCode": 9}
    chromium.press("Tab", **tab)
    assert chromium.run("document.activeElement.className") == "skip"
    chromium.run("new Promise(requestAnimationFrame)")
    assert chromium.run("document.activeElement.getBoundingClientRect().left") >= 0
    chromium.press("Enter", windowsVirtualKeyCode=13, text="\r")
    assert chromium.run("document.activeElement.id") == "main"
    # A table too wide for the window, as many classes make one, and others that are not.
    wide = "document.querySelector('.matrix')"
    chromium.run(f"{wide}.style.minWidth = '900px'; dispatchEvent(new Event('resize'))")
    reached = []
    for _ in range(12):
        chromium.press("Tab", **tab)
        reached.append(chromium.run("document.activeElement.getAttribute('aria-label')"))
    assert "混淆矩阵：行为真实类别，列为模型的判断" in reached
    assert "运行环境" not in reached
    fitting = "[...document.querySelectorAll('.scroll')].filter((x) => x.tabIndex < 0).length"
    assert chromium.run(fitting) > 5
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    chromium.press("Tab", modifiers=8, **tab)
    assert chromium.run(outline) == "solid"


def test_a_screen_reader_finds_landmarks_headings_tables_and_named_pictures(
    chromium: Browser, url: str
) -> None:
    chromium.look_like(1280, 900)
    chromium.open(url)
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in chromium.call("Accessibility.getFullAXTree")["nodes"]
        if "role" in node
    ]
    roles = [role for role, _ in nodes]
    for landmark in ("banner", "navigation", "main"):
        assert roles.count(landmark) == 1, landmark
    pictures = [name for role, name in nodes if role in ("image", "img")]
    assert len(pictures) == 8
    assert all(len(name) > 10 for name in pictures)
    headings = [name for role, name in nodes if role == "heading"]
    assert headings[1:6] == ["评估", "训练", "主机内存占用", "方案与理由", "其他说明"]
    assert all(name for role, name in nodes if role in ("table", "region", "combobox"))


def test_it_prints_on_a_few_pages(chromium: Browser, url: str, tmp_path: Path) -> None:
    chromium.look_like(1280, 900, dark=True, on_paper=True)
    chromium.open(url)
    printed = chromium.call("Page.printToPDF", printBackground=False, paperWidth=8.27)
    pdf = base64.b64decode(printed["data"])
    (tmp_path / "report.pdf").write_bytes(pdf)
    assert 2 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") <= 6
    # A4 less its margins: plots stand side by side and nothing is cut off.
    chromium.look_like(688, 1000, dark=True, on_paper=True)
    tops = chromium.run(
        "[...document.querySelectorAll('.plots')].map((one) => [...one.querySelectorAll('figure')]"
        ".map((figure) => Math.round(figure.getBoundingClientRect().top)))"
    )
    assert [row[0] == row[1] for row in tops if len(row) > 1] == [True] * 2
    assert chromium.run("document.documentElement.scrollWidth") <= 688
    assert min(one["contrast"] for one in chromium.run(TEXTS)) > 4.5


def test_the_live_page_follows_the_run_keeps_its_place_and_stops_at_the_end(
    chromium: Browser, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_REST", 0)  # this test has waited enough
    lines = (trained / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    shutil.copy(trained / "run.toml", tmp_path)
    log = tmp_path / "progress.jsonl"
    log.write_text("\n".join(lines[:20]) + "\n", encoding="utf-8")
    page = LivePage(tmp_path, "zh")
    app = PageApp(page)
    with served_in_thread(app, bound_socket(HOST, 0)) as url:
        chromium.look_like(390, 844)
        chromium.open(url + app.path)
        first = chromium.run("document.querySelector('progress').value")
        chromium.run("document.getElementById('configuration').open = true; scrollTo(0, 700)")
        log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        chromium.wait_for(f"document.querySelector('progress').value > {first}")
        assert chromium.run("scrollY") == 700
        assert chromium.run("document.getElementById('said').textContent") == ""
        assert chromium.run("document.getElementById('configuration').open")
        RunLog(tmp_path).ended("failed", "<img src=x onerror=alert(1)> 设备丢失")
        page.ended = True
        chromium.wait_for("document.getElementById('updates').hidden")
        assert "失败" in chromium.run("document.getElementById('state').innerText")
        assert chromium.run("document.getElementById('said').textContent") == "失败"
        assert chromium.run("document.images.length") == 0
        asked = page.asked_at
        chromium.run("new Promise((done) => setTimeout(done, 3000))")
        assert page.asked_at == asked
        assert chromium.messages == []


def test_a_sentence_is_answered_a_curve_says_its_values_and_a_path_is_copied(
    chromium: Browser, trained: Path
) -> None:
    page = LivePage(trained, "en", trial=RunModel(trained, "en", "cpu"))
    page.ended = True
    app = PageApp(page)
    with served_in_thread(app, bound_socket(HOST, 0)) as url:
        chromium.look_like(1280, 900)
        chromium.open(url + app.path)
        chromium.run(
            "document.querySelector('textarea').value = '<img src=x> 房間很髒';"
            "document.getElementById('trial').requestSubmit()"
        )
        assert "Loading the model" in chromium.run("document.getElementById('answer').textContent")
        chromium.wait_for("document.querySelectorAll('#scores li').length === 2")
        expected = memfit.load(trained).predict("<img src=x> 房間很髒")[0]
        assert chromium.run("document.querySelector('#answer b').textContent") == expected.label
        assert chromium.run("document.images.length") == 0
        x, y = chromium.run(
            "(() => { const svg = document.querySelector('figure[data-hover] svg');"
            "svg.scrollIntoView({ block: 'center', behavior: 'instant' });"
            "const box = svg.getBoundingClientRect();"
            "return [box.right - 20, box.top + box.height / 2]; })()"
        )
        chromium.run("new Promise((done) => setTimeout(done, 200))")
        chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        said = chromium.run("document.querySelector('.tip').innerText")
        assert "step 24 · epoch" in said
        assert "training" in said
        assert "validation" in said
        copy = "document.querySelector('.path .copy')"
        chromium.run(f"{copy}.focus()")
        chromium.press("Enter", windowsVirtualKeyCode=13, text="\r")
        chromium.wait_for(f"{copy}.textContent === 'copied'")
        assert chromium.run(f"{copy}.dataset.copy") == str(trained)
        assert chromium.messages == []


@pytest.mark.parametrize("look", ["light", "phone-dark"])
def test_a_comparison_can_be_read(
    chromium: Browser, trained: Path, tmp_path: Path, look: str
) -> None:
    shutil.copytree(trained, tmp_path / "另一次运行", ignore=shutil.ignore_patterns("checkpoints"))
    with speaking("zh"):
        path = memfit.compare(trained, tmp_path).write_page(tmp_path / "comparison.html")
    chromium.look_like(**LOOKS[look])
    chromium.open(path.as_uri())
    assert chromium.messages == []
    assert chromium.run("document.documentElement.scrollWidth") <= LOOKS[look]["width"]
    texts: list[dict[str, Any]] = chromium.run(TEXTS)
    assert any("另一次运行" in item["text"] for item in texts)
    assert [item for item in texts if item["contrast"] < 4.5 or item["size"] < 11] == []


class LookAtPage(TrainerCallback):
    """Opens the page that training says it serves, at the fourth step."""

    def __init__(self, chromium: Browser, capsys: pytest.CaptureFixture[str]) -> None:
        self.chromium, self.capsys = chromium, capsys
        self.url = ""

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == 4:
            said = self.capsys.readouterr().err
            self.url = said.partition("watch    ")[2].split()[0]
            self.chromium.open(self.url)


def test_training_with_watch_serves_its_page_to_the_end(
    chromium: Browser,
    trained: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chromium.look_like(1280, 900)
    looked = LookAtPage(chromium, capsys)
    memfit.finetune(
        trained.parent / "reviews.csv", model=tiny_model_dir, output_dir=tmp_path / "run",
        batch_size=8, max_steps=6, max_length=32, exact=True, quiet=True, watch=True,
        callbacks=[looked],
    )  # fmt: skip
    assert looked.url.startswith("http://127.0.0.1:")
    chromium.wait_for("document.querySelector('.state').className === 'state finished'")
    assert chromium.run("document.querySelectorAll('.matrix').length") == 1
    assert chromium.messages == []
