"""The HTML report: complete, escaped, self-contained, and small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_fixtures import ACTING, EVIL, PLAN, Page, add_samples, make_run

from memfit.config.files import plain
from memfit.data import LabelSpace
from memfit.errors import OutputError
from memfit.i18n import speaking
from memfit.memory.components import Component, MemoryPeak
from memfit.records.evaluation import (
    ClassRow,
    Evaluation,
    Mistake,
    evaluate_predictions,
    worst_mistakes,
)
from memfit.records.results import (
    MemorySummary,
    RankFigures,
    RunFolder,
    RunSummary,
    read_summary,
    write_evaluation,
    write_summary,
)
from memfit.records.run_warnings import RunWarning
from memfit.report import page, plots
from memfit.report import plots as drawing
from memfit.report.page import write_report


def shown(run: Path, **options: Any) -> Page:
    return Page(write_report(run, **options).read_text(encoding="utf-8"))


def test_the_page_holds_everything_a_run_left(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'budget = "4GB"\n[data]\npath = "評論.csv"\n', encoding="utf-8"
    )
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    add_samples(make_run(tmp_path))
    found = shown(tmp_path)
    for words in (
        "Finished 3 min 20 s of training on RTX 3060 2025-01-02 03:04",
        "75.0 % of the 8 validation texts are answered right, where always answering 負評 would "
        "reach 50.0 %; its memory stayed at 58 % of the budget of 4.00 GB (3.73 GiB).",
        "F1 (of 正評)",
        "Predicted: 2.15 GiB at the peak, 58 % of the budget of 4.00 GB (3.73 GiB)",
        "Measured: 2.15 GiB at the peak, 58 % of the budget of 4.00 GB (3.73 GiB)",
        "The prediction was 0.0 % above what was measured.",
        "reserved, unused",
        "the peak is in bert.encoder.layer.7",
        "Nothing had to be adjusted",
        "rounding, the same algorithm with fewer bits",
        "recomputes 9 of 24 layers: saves 1.1 GiB",
        "layers 9, part layer",
        "peaks at 2.1 GiB",
        "63 ms",
        "validation texts also trained on",
        "A max_length of 128 cuts 9 of them (9 %).",
        "import memfit",
        'path = "評論.csv"',
        "房間很乾淨",
    ):
        assert words in found.words, words
    labels = found.values("svg", "aria-label")
    # Loss, metrics, throughput, gradient norm, learning rate; bars, memory over time; lengths.
    assert len(labels) == 8
    assert "training: from 1 at step 1 to 0.02564 at step 39" in labels[0]
    assert "Rows trained on a second" in labels[2]
    assert found.values("svg", "role") == ["img"] * 8


def test_every_word_of_the_page_is_chinese_when_asked(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    add_samples(make_run(tmp_path))
    found = shown(tmp_path, lang="zh")
    assert found.values("html", "lang") == ["zh-Hans"]
    for words in (
        "已完成",
        "显存占用",
        "预算 4.00 GB (3.73 GiB)",
        "混淆矩阵",
        "方案与理由",
        "使用模型",
    ):
        assert words in found.words, words
    for words in ("Memory", "Training", "Evaluation", "budget of", "rows that", "confusion"):
        assert words not in found.words, words


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
        finished_at=EVIL,
    )
    (run / "run.toml").write_text(f'path = "{EVIL}"')
    name = json.dumps(EVIL.replace("\u202e", ""))
    (run / "plan.toml").write_text(f"fidelity = {name}\n[strategies]\n{name} = {{a = {name}}}\n")
    adjusted = {"step": 3, "why": EVIL, "from": EVIL, "to": {EVIL: EVIL}}
    (run / "adjustments.jsonl").write_text(json.dumps(adjusted) + "\nnot json\n")
    add_samples(run)
    html = write_report(run).read_text(encoding="utf-8")
    found = Page(html)
    assert found.tags.count("script") == 1
    assert "<script>alert(1)</script>" in found.text
    assert not ACTING & set(html)
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]


def test_only_its_own_script_may_run_and_nothing_is_fetched(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    found = Page(html)
    (policy,) = [value for _, name, value in found.attributes if value.startswith("default-src")]
    digest = base64.b64encode(hashlib.sha256("".join(found.scripts).encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; ")
    assert f"script-src 'sha256-{digest}'; " in policy
    assert "connect-src 'none'" in policy
    for tag, name, value in found.attributes:
        if name in ("src", "href", "xlink:href", "action"):
            assert value[:1] == "#" or (tag, value) == ("link", "data:,")
    assert "@import" not in html
    assert "url(http" not in html


def test_the_page_is_read_in_order_by_a_screen_reader(tmp_path: Path) -> None:
    add_samples(make_run(tmp_path))
    found = shown(tmp_path)
    assert found.values("html", "lang") == ["en"]
    assert "width=device-width, initial-scale=1" in found.values("meta", "content")
    headings = [int(tag[1]) for tag in found.tags if re.fullmatch(r"h\d", tag)]
    assert headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip([0, *headings], headings, strict=False))
    assert {"header", "nav", "main"} <= set(found.tags)
    assert found.tags.count("table") == found.tags.count("caption")
    assert found.tags.count("figure") == found.tags.count("figcaption") == found.tags.count("svg")
    identifiers = [value for _, name, value in found.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    # Every link and every name of a section leads to something that is there.
    targets = [*found.values("section", "aria-labelledby")]
    targets += [link[1:] for link in found.values("a", "href")]
    assert targets
    assert set(targets) <= set(identifiers)
    # What scrolls sideways can be scrolled with the keyboard, and has a name.
    scrolls = found.values("div", "class").count("scroll")
    assert found.values("div", "tabindex") == ["0"] * scrolls
    assert all(found.values("div", "aria-label"))


def test_without_matplotlib_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_samples(make_run(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = shown(tmp_path)
    assert "svg" not in found.tags
    assert "pip install memfit[report]" in found.text
    assert "F1 (of 正評)" in found.text


def test_a_bare_summary_is_enough(tmp_path: Path) -> None:
    write_summary(tmp_path, RunSummary(model="m", task="regression", metrics={"mse": 0.25}))
    found = shown(tmp_path)
    assert "MSE" in found.text
    assert "logged nothing to draw" in found.text
    assert "#data" not in found.values("a", "href")


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
    text = shown(tmp_path).text
    for words in ("F1 (micro)", "all labels right", "早餐難吃", "房間, 早餐", "time training"):
        assert words in text
    assert "Confusion" not in text
    value = LabelSpace("regression", ("score",))
    outputs, truth = np.array([1.0, 30.0]), np.array([1.0, 4.0])
    result = evaluate_predictions(outputs, truth, value)
    write_evaluation(tmp_path, result, worst_mistakes(outputs, truth, value, ["好", "貴"], limit=1))
    write_summary(tmp_path, RunSummary(model="m", task="regression", metrics=result.metrics))
    text = shown(tmp_path).text
    assert "338" in text  # the mean of 0 and 26 squared
    assert "貴" in text


def test_a_folder_without_a_run_gets_no_page(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"no summary\.json"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_many_classes_long_texts_and_a_hundred_thousand_steps_stay_small(tmp_path: Path) -> None:
    run = make_run(tmp_path, names=tuple(f"類別{number}" for number in range(300)))
    saved = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    saved["mistakes"] = plain([Mistake("長" * 100_000, "a", "b", 0.5)] * 12)
    (run / "evaluation.json").write_text(json.dumps(saved), encoding="utf-8")
    draw = np.random.default_rng(0)
    history = [
        {"step": step, "loss": float(value), "learning_rate": 1e-5}
        for step, value in enumerate(draw.random(100_000))
    ]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    adjusted = [json.dumps({"step": step, "why": "w"}) for step in range(2000)]
    (run / "adjustments.jsonl").write_text("\n".join(adjusted))
    add_samples(run, steps=2000)
    path = write_report(run)
    assert path.stat().st_size < 500_000
    text = Page(path.read_text(encoding="utf-8")).text
    assert "The 100 weakest of 300 classes" in text
    assert "The most frequent confusions" in text
    assert "the first 50 of 2,000" in text


@pytest.mark.usefixtures("undrawn")
def test_a_peak_over_the_budget_is_said_loudly(tmp_path: Path) -> None:
    peak = MemoryPeak({Component.WEIGHTS: 300}, 300, 300, 400)
    found = shown(make_run(tmp_path, memory=MemorySummary(200, None, peak)))
    assert "Measured: 400 B at the peak, 200 B over the budget of 200 B" in found.words
    assert "bad" in found.values("p", "class")


@pytest.mark.usefixtures("undrawn")
def test_the_live_page_asks_for_itself_again_and_may_reach_nothing_else(tmp_path: Path) -> None:
    add_samples(tmp_path)
    found = Page(page.render(RunFolder(tmp_path), live=True))
    assert found.values("html", "data-refresh") == ["2000"]
    (policy,) = [value for value in found.values("meta", "content") if "connect-src" in value]
    assert "connect-src 'self'" in policy
    assert found.values("progress", "value") == ["40"]
    assert "step 40 of 438" in found.words
    assert "about 3 min 19 s left" in found.words  # 398 steps at half a second
    make_run(tmp_path)
    assert Page(page.render(RunFolder(tmp_path), live=True)).values("html", "data-refresh") == []


def test_long_curves_are_thinned_and_keep_their_last_point_and_their_peak() -> None:
    points = [(float(step), 0.0) for step in range(100_000)]
    thin = plots.thin(points)
    assert len(thin) <= plots.MOST_POINTS + 1
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert plots.thin(points[:10]) == points[:10]
    points[777] = (777.0, 5.0)
    highest = plots.thin(points, highest=True)
    assert len(highest) <= plots.MOST_POINTS
    assert max(value for _, value in highest) == 5.0


def test_drawings_are_valid_and_take_the_pages_colours() -> None:
    def draw(last: float = 4.0) -> str:
        lines = [plots.Line("a", [(1, 2.0)], 0), plots.Line("b", [(1, 3.0), (2, last)], 1)]
        return plots.line_chart(lines, name="loss", label='x "<&> y', x_label="步").svg

    svg = draw()
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == 'x "<&> y'
    assert root.get("width") is None
    assert "步" in svg
    assert "var(--series-1)" in svg
    assert "currentColor" in svg
    assert "DejaVu" not in svg
    assert not re.search(r"#a100\w\w", svg)
    assert svg != draw(5.0)
    assert svg == draw()


def test_a_pointer_over_a_curve_finds_the_values_that_were_logged(tmp_path: Path) -> None:
    add_samples(make_run(tmp_path))
    found = shown(tmp_path)
    loss, metrics, speed, *_ = [json.loads(one) for one in found.values("figure", "data-hover")]
    assert [line["name"] for line in loss["lines"]] == ["training", "validation"]
    assert loss["lines"][0]["points"][3] == [4, 0.25]
    assert loss["lines"][1]["points"] == [[20, 0.4]]
    assert loss["epoch"] == 20
    # 16 rows a step at half a second each.
    assert {value for _, value in speed["lines"][0]["points"]} == {32}
    left, top, right, bottom = loss["box"]
    assert 0 < left < right <= 4.5 * 72
    assert 0 < top < bottom < 2.6 * 72
    # All curves end at the last step that any of them knows, less the two percent left free.
    assert loss["x"] == metrics["x"] == speed["x"] == [0, pytest.approx(40 * 1.02)]


def test_the_best_checkpoint_and_the_epochs_are_on_the_curves(tmp_path: Path) -> None:
    add_samples(make_run(tmp_path, best_checkpoint="checkpoint-20"))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    words = Page(html).words
    assert words.count("best checkpoint, step 20") == 2  # loss and metrics
    assert words.count("epoch 1") == 5
    assert "swatch star" in html


@pytest.mark.usefixtures("undrawn")
def test_a_report_keeps_the_language_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    make_run(tmp_path, language="zh")
    assert shown(tmp_path).values("html", "lang") == ["zh-Hans"]
    with speaking("en"):  # as --lang does
        assert shown(tmp_path).values("html", "lang") == ["en"]
    assert shown(tmp_path, lang="en").values("html", "lang") == ["en"]
    make_run(tmp_path)  # of an earlier version, which did not keep it
    assert shown(tmp_path).values("html", "lang") == ["en"]


@pytest.mark.usefixtures("undrawn")
def test_every_command_and_path_has_a_button_that_copies_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('budget = "4GB"\n')
    found = shown(make_run(tmp_path))
    copies = found.values("button", "data-copy")
    assert copies[0] == str(tmp_path)
    assert f'memfit predict {tmp_path} "…"' in copies
    assert f"memfit train --config {tmp_path}/run.toml --output-dir NEW_FOLDER" in copies
    assert 'budget = "4GB"' in copies
    assert found.tags.count("pre") == len(copies) - 1
    assert found.tags.count("textarea") == 0  # nobody would answer a page on disk


VERDICTS = [
    # accuracy, rows of the two classes, warnings, how good, its words
    (0.9, (50, 50), (), "good", "90.0 % of the 100 validation texts are answered right"),
    (0.9, (50, 50), ("duplicates",), "doubtful", "90.0 % of the 100"),
    (0.951, (5, 95), (), "doubtful", "Hardly better than no model: 95.1 %"),
    (0.95, (5, 95), ("one_class",), "bad", "Do not use this model: it gives every text the same"),
]


@pytest.mark.parametrize(("accuracy", "rows", "kinds", "css", "words"), VERDICTS)
def test_the_first_sentence_says_what_the_model_is_worth(
    tmp_path: Path,
    accuracy: float,
    rows: tuple[int, int],
    kinds: tuple[str, ...],
    css: str,
    words: str,
) -> None:
    known = {"label": "正評", "rows": 3, "missed": ["負評"]}
    make_run(tmp_path, warnings=tuple(RunWarning(kind, known) for kind in kinds))
    classes = tuple(
        ClassRow(name, 0.5, 0.5, 0.5, count)
        for name, count in zip(("負評", "正評"), rows, strict=True)
    )
    write_evaluation(
        tmp_path, Evaluation("single_label", 100, {"accuracy": accuracy}, classes=classes)
    )
    found = shown(tmp_path)
    assert f"verdict {css}" in found.values("p", "class")
    assert words in found.words
    body = found.words[found.words.index("Made with") :]  # after the list of contents
    order = [words, *(one.sentence for one in read_summary(tmp_path).warnings)]
    order += ["Evaluation", "Training", "Predicted: 2.15 GiB"]
    places = [body.index(one) for one in order]
    assert places == sorted(places)


def test_bars_are_as_long_as_the_bytes_they_stand_for() -> None:
    bars = {"predicted": {"weights": 100, "activations": 300}, "measured": {"weights": 200}}
    svg = plots.memory_bars(bars, 500, name="bars", label="bars")
    widths = {}
    for colour in ("weights", "activations"):
        paths = re.findall(rf'<path d="([^"]+)"[^>]*style="fill: var\(--{colour}\)', svg)
        widths[colour] = [_width(path) for path in paths]
    assert widths["weights"][1] == pytest.approx(2 * widths["weights"][0], rel=1e-3)
    assert widths["activations"] == [pytest.approx(3 * widths["weights"][0], rel=1e-3)]


def _width(path: str) -> float:
    x = [float(pair.split()[0]) for pair in re.findall(r"[ML] ([\d. ]+)", path)]
    return max(x) - min(x)


# ---- colours ----


def luminance(colour: tuple[float, ...]) -> float:
    channels = [value / 255 for value in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


def rgb(colour: str) -> tuple[float, ...]:
    if colour.startswith("#"):
        return tuple(int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return tuple(float(part) for part in colour.split())


@pytest.mark.parametrize("colours", [drawing.LIGHT, drawing.DARK], ids=["light", "dark"])
def test_text_stands_out_by_day_and_by_night(colours: dict[str, str]) -> None:
    inks = ("ink", "quiet", "good", "bad", "series-1", "series-2", "series-3", "series-4")
    for ink in inks:
        for ground in ("paper", "panel"):
            ratio = contrast(rgb(colours[ink]), rgb(colours[ground]))
            assert ratio >= 4.5, (ink, ground, ratio)
    # The darkest cell of the confusion matrix is 45 % of the shade over the paper.
    shade, paper = rgb(colours["shade"]), rgb(colours["paper"])
    cell = tuple(0.45 * a + 0.55 * b for a, b in zip(shade, paper, strict=True))
    assert contrast(rgb(colours["ink"]), cell) >= 4.5
    # Edges of controls, and bars against the page: 3 is what shapes need.
    assert contrast(rgb(colours["edge"]), paper) >= 3


def test_both_palettes_have_the_same_names_and_paper_is_always_light() -> None:
    assert drawing.LIGHT.keys() == drawing.DARK.keys()
    css = drawing.palette_css()
    assert css.count("@media screen") == 2  # night is for screens
    used = set(re.findall(r"var\(--([\w-]+)", page.own_file("page.css")))
    assert used - {"share", "colour", "runs"} <= drawing.LIGHT.keys()


def test_each_rank_of_several_has_its_row(tmp_path: Path) -> None:
    def figures(rank: int, tokens: int) -> RankFigures:
        return RankFigures(
            rank=rank, device=f"Tesla T4 {EVIL}", peak_bytes=3 * 2**30, step_seconds=61.0,
            tokens=tokens,
        )  # fmt: skip

    assert "Each rank" not in shown(make_run(tmp_path)).words
    run = make_run(tmp_path, ranks=(figures(0, 12345), figures(1, 999)))
    assert read_summary(run).ranks[1] == figures(1, 999)
    found = shown(run)
    assert "rank device highest memory in steps tokens" in found.words
    for tokens in ("12,345", "999"):
        assert f"3.00 GiB 1 min 01 s {tokens}" in found.words
    assert not ACTING & set(found.text)
