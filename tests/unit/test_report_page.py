"""The HTML report: complete, escaped, self-contained, and small."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memfit.data.values import DataCounts, LabelSpace, LengthBin, LengthSummary
from memfit.errors import OutputError
from memfit.evaluation import Mistake, evaluate_predictions, worst_mistakes
from memfit.files import plain
from memfit.memory.components import Component, MemoryPeak
from memfit.report import page, plots
from memfit.results import MemorySummary, RunSummary, versions, write_evaluation, write_summary
from memfit.units import MIB

EVIL = "<script>alert(1)</script>\"'&\x00\x1b[2J"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Text, tags and attributes; fails on tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def make_run(folder: Path, names: tuple[str, ...] = ("負評", "正評"), **changes: Any) -> Path:
    space, rows = LabelSpace("single_label", names), 4 * len(names)
    labels = np.arange(rows) % len(names)
    logits = np.eye(len(names))[np.where(np.arange(rows) % 4 == 1, 0, labels)]
    result = evaluate_predictions(logits, labels, space)
    texts = [f"房間很乾淨 {row} {EVIL}" for row in range(rows)]
    write_evaluation(folder, result, worst_mistakes(logits, labels, space, texts))
    peak = MemoryPeak(
        {
            Component.WEIGHTS: 600 * MIB,
            Component.ACTIVATIONS: 900 * MIB,
            Component.CONTEXT: 500 * MIB,
        },
        allocated_bytes=1500 * MIB,
        reserved_bytes=1700 * MIB,
        device_bytes=2200 * MIB,
        module="bert.encoder.layer.7",
    )
    counts = DataCounts(
        rows_read=101,
        dropped_no_text=1,
        dropped_no_label=0,
        train_rows=90,
        validation_rows=10,
        duplicates_across_split=2,
        train_class_counts=dict.fromkeys(names, 45),
        validation_class_counts=dict.fromkeys(names, 5),
    )
    lengths = LengthSummary(
        count=100, mean=70.0, p50=66, p90=120, p99=300, max=1234, max_length=128, cut_rows=9,
        histogram=tuple(LengthBin(16 * n, 16 * n + 15, 10 - n) for n in range(10)),
    )  # fmt: skip
    values: dict[str, Any] = {
        "model": "hfl/rbt3",
        "task": "single_label",
        "labels": names,
        "metrics": result.metrics,
        "averaging": result.averaging,
        "positive": result.positive,
        "training": {"steps": 438, "epochs": 2.0, "learning_rate": 2e-5, "bf16": True},
        "data": plain(counts),
        "lengths": plain(lengths),
        "seconds": {"train": 200.0, "total": 250.0},
        "memory": MemorySummary(4 * 10**9, peak, peak),
        "device": "CPU",
        "versions": versions(),
        "finished_at": "2025-01-02T03:04:05",
    }
    write_summary(folder, RunSummary(**{**values, **changes}))
    history = [{"step": step, "loss": 1 / step, "learning_rate": 1e-5} for step in range(1, 40)]
    history += [{"step": 20, "eval_loss": 0.4, "eval_f1": 0.9, "eval_runtime": 3.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


def test_the_page_holds_everything_a_run_left(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'budget = "4GB"\n[data]\npath = "評論.csv"\n', encoding="utf-8"
    )
    path = page.write_report(make_run(tmp_path))
    assert path == tmp_path / "report.html"
    shown = Page(path.read_text(encoding="utf-8"))
    text = " ".join(shown.text.split())
    for words in (
        "Finished after 3 min 20 s of training on CPU, 2025-01-02 03:04.",
        "F1 (of 正評)",
        "58 % of the budget of 4.00 GB (3.73 GiB)",
        "reserved, unused",
        "the peak is in bert.encoder.layer.7",
        "validation texts also trained on",
        "A max_length of 128 cuts 9 of them (9 %).",
        'path = "評論.csv"',
        "房間很乾淨",
    ):
        assert words in text
    assert shown.tags.count("svg") == 4  # loss, metrics, learning rate, lengths
    assert [name for tag, name, _ in shown.attributes if tag == "svg"].count("aria-label") == 4


def test_text_from_data_never_becomes_markup(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        names=(EVIL, "</table>"),
        model=f"org/{EVIL}",
        training={EVIL: EVIL},
        device=EVIL,
        versions={EVIL: EVIL},
        best_checkpoint=EVIL,
        status=EVIL,
    )
    (run / "run.toml").write_text(f'path = "{EVIL}"')
    html = page.write_report(run).read_text(encoding="utf-8")
    shown = Page(html)
    assert "script" not in shown.tags
    assert "<script>alert(1)</script>" in shown.text
    assert not {"\x00", "\x1b"} & set(html)
    assert not [name for _, name, _ in shown.attributes if name.startswith("on")]


def test_the_page_fetches_nothing_and_reads_without_a_mouse(tmp_path: Path) -> None:
    html = page.write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    shown = Page(html)
    for tag, name, value in shown.attributes:
        if name in ("src", "href", "xlink:href", "action"):
            assert (tag, value[:1]) == ("use", "#")
    assert "@import" not in html
    assert "url(http" not in html
    assert ("html", "lang", "en") in shown.attributes
    assert any(name == "name" and value == "viewport" for _, name, value in shown.attributes)
    headings = [tag for tag in shown.tags if re.fullmatch(r"h\d", tag)]
    assert headings[0] == "h1"
    assert set(headings[1:]) == {"h2"}
    assert shown.tags.count("table") == shown.tags.count("caption")
    identifiers = [value for _, name, value in shown.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))


def test_without_matplotlib_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = Page(page.write_report(make_run(tmp_path)).read_text(encoding="utf-8"))
    assert "svg" not in shown.tags
    assert "pip install memfit[report]" in shown.text
    assert "F1 (of 正評)" in shown.text


def test_a_bare_summary_is_enough(tmp_path: Path) -> None:
    write_summary(tmp_path, RunSummary(model="m", task="regression", metrics={"mse": 0.25}))
    shown = Page(page.write_report(tmp_path).read_text(encoding="utf-8"))
    assert "MSE" in shown.text
    assert "logged nothing to draw" in shown.text


def test_tasks_without_a_confusion_matrix_have_a_page_too(tmp_path: Path) -> None:
    space = LabelSpace("multi_label", ("房間", "早餐"))
    logits, labels = np.array([[2.0, -2.0], [2.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    result = evaluate_predictions(logits, labels, space)
    mistakes = worst_mistakes(logits, labels, space, ["好", "早餐難吃"])
    write_evaluation(tmp_path, result, mistakes)
    write_summary(
        tmp_path,
        RunSummary(
            model="m",
            task="multi_label",
            metrics=result.metrics,
            averaging=result.averaging,
            seconds={"train": 5.0},
        ),
    )
    text = Page(page.write_report(tmp_path).read_text(encoding="utf-8")).text
    for words in ("F1 (micro)", "all labels right", "早餐難吃", "房間, 早餐", "time training"):
        assert words in text
    assert "Confusion" not in text
    value = LabelSpace("regression", ("score",))
    outputs, truth = np.array([1.0, 30.0]), np.array([1.0, 4.0])
    result = evaluate_predictions(outputs, truth, value)
    write_evaluation(tmp_path, result, worst_mistakes(outputs, truth, value, ["好", "貴"], limit=1))
    write_summary(tmp_path, RunSummary(model="m", task="regression", metrics=result.metrics))
    text = Page(page.write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "338" in text  # the mean of 0 and 26 squared
    assert "貴" in text


def test_a_folder_without_a_run_gets_no_page(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"no summary\.json"):
        page.write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_many_classes_long_texts_and_a_long_log_stay_small(tmp_path: Path) -> None:
    run = make_run(tmp_path, names=tuple(f"類別{number}" for number in range(300)))
    saved = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    saved["mistakes"] = plain([Mistake("長" * 100_000, "a", "b", 0.5)] * 12)
    (run / "evaluation.json").write_text(json.dumps(saved), encoding="utf-8")
    history = [{"step": step, "loss": 1.0, "learning_rate": 1e-5} for step in range(20_000)]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    path = page.write_report(run)
    assert path.stat().st_size < 300_000
    text = Page(path.read_text(encoding="utf-8")).text
    assert "The 100 weakest of 300 classes" in text
    assert "The most frequent confusions" in text


def test_a_peak_over_the_budget_is_marked(tmp_path: Path) -> None:
    peak = MemoryPeak({Component.WEIGHTS: 300}, 300, 300, 400)
    run = make_run(tmp_path, memory=MemorySummary(200, None, peak))
    shown = Page(page.write_report(run).read_text(encoding="utf-8"))
    assert "200 B over the budget" in shown.text
    marks = [value for tag, name, value in shown.attributes if tag == "u" and name == "style"]
    assert marks == ["left: calc(50.0% - 1px)"]


def test_what_is_not_a_number_is_not_drawn() -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "loss": float("nan")},
        {"step": 2, "loss": 0.5},
        {"step": 3, "eval_loss": 0.1, "eval_f1": 0.9, "eval_runtime": 1.0, "loss": None},
        {"loss": 0.1},
    ]
    assert page.series(history, "loss") == [(2, 0.5)]
    assert page.metric_names(history) == ["f1"]


def test_long_curves_are_thinned_and_keep_their_last_point() -> None:
    points = [(float(step), 0.0) for step in range(100_000)]
    thin = plots.thin(points)
    assert len(thin) <= plots.MOST_POINTS + 1
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert plots.thin(points[:10]) == points[:10]


def test_drawings_are_valid_and_take_the_pages_colours() -> None:
    svg = plots.curves({"a": [(1, 2.0)], "正確率": [(1, 3.0), (2, 4.0)]}, title='x "<&> y')
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == 'x "<&> y'
    assert root.get("width") is None
    assert "正確率" in svg
    assert "var(--series-1)" in svg
    assert "currentColor" in svg
    assert "DejaVu" not in svg
    assert not re.search(r"#a100\w\w", svg)
    assert svg == plots.curves({"a": [(1, 2.0)], "正確率": [(1, 3.0), (2, 4.0)]}, title='x "<&> y')


def luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_text_stands_out_by_day_and_by_night() -> None:
    css = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[:2]
    for block in blocks:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
        for ink in ("ink", "quiet", "series-1", "series-2", "series-3", "series-4"):
            for ground in ("paper", "panel"):
                pair = sorted([luminance(colours[ink]), luminance(colours[ground])])
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (ink, ground)
