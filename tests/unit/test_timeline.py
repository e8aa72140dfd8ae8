"""The timeline page: what it shows at the peak, and that it stands on its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.memory.components import Component, Event
from memfit.report.timeline import Moment, holders, moments, write_timeline
from memfit.units import GIB, KIB, MIB

WEIGHTS, ACTIVATIONS = Component.WEIGHTS, Component.ACTIVATIONS


def layered_step(layers: int = 3, mib: int = 4) -> list[Event]:
    """Weights, then a forward pass that keeps one block a layer, then a backward that frees it."""
    events = [Event(n, MIB, True, WEIGHTS, f"encoder.layer.{n}") for n in range(layers)]
    kept = range(layers, 2 * layers)
    for n in kept:
        module = f"encoder.layer.{n - layers}"
        events.append(Event(n, mib * MIB, True, ACTIVATIONS, module))
    events.append(Event(2 * layers, 7 * MIB, True, ACTIVATIONS, "classifier"))
    events.append(Event(2 * layers, 7 * MIB, False, ACTIVATIONS, "classifier"))
    events += [Event(n, mib * MIB, False, ACTIVATIONS, "") for n in reversed(kept)]
    return events


def peak_moment(events: list[Event]) -> Moment:
    return max(moments(events), key=lambda moment: moment.total_bytes)


def test_the_peak_is_found_with_its_components_and_its_module() -> None:
    peak = peak_moment(layered_step())
    assert peak.module == "classifier"
    assert peak.event == 6
    assert peak.components[WEIGHTS] == 3 * MIB
    assert peak.components[ACTIVATIONS] == (3 * 4 + 7) * MIB


def test_thinning_keeps_the_peak() -> None:
    events = layered_step(layers=500)
    few = moments(events, limit=20)
    assert len(few) <= 20
    assert max(m.total_bytes for m in few) == max(
        m.total_bytes for m in moments(events, limit=9999)
    )


def test_holders_count_the_layers_of_a_model_as_one() -> None:
    events = layered_step()
    found = holders(events, peak_moment(events).event)
    assert [(h.component, h.module, h.blocks, h.nbytes) for h in found] == [
        (ACTIVATIONS, "encoder.layer.*", 3, 12 * MIB),
        (ACTIVATIONS, "classifier", 1, 7 * MIB),
        (WEIGHTS, "encoder.layer.*", 3, 3 * MIB),
    ]


def test_the_page_shows_peak_module_components_budget_and_phases(tmp_path: Path) -> None:
    page = write_timeline(
        layered_step(),
        tmp_path / "timeline.html",
        title="A step <of> ours",
        context_bytes=100 * MIB,
        reserved_bytes=40 * MIB,
        budget_bytes=GIB,
        phases=[(3, "forward"), (8, "backward")],
    ).read_text(encoding="utf-8")
    assert "A step &lt;of&gt; ours" in page
    for text in ("tensors and context 122.0 MiB", "budget 1.00 GiB", "forward", "backward"):
        assert text in page
    assert "<code>classifier</code>" in page
    assert "<b>140.0 MiB</b><span>of the device</span>" in page
    rows = re.findall(r'</span>(\w+)</td><td class="number">([\d.]+ MiB)</td>', page)
    assert rows == [("context", "100.0 MiB"), ("activations", "19.0 MiB"), ("weights", "3.0 MiB")]


def test_names_of_phases_that_begin_together_stand_on_lines_of_their_own(tmp_path: Path) -> None:
    events = layered_step(layers=50)
    last = len(events) - 1
    phases = [(0, "weights"), (1, "workspaces"), (90, "update"), (last - 9, "late"), (last, "end")]
    page = write_timeline(events, tmp_path / "t.html", phases=phases).read_text(encoding="utf-8")
    heights = {}
    for _, name in phases:
        found = re.search(rf'<text [^>]*?y="([\d.]+)"[^>]*>\s*{name}\s*</text>', page)
        assert found, name
        heights[name] = float(found[1])
    assert heights["weights"] < heights["workspaces"]
    assert heights["update"] == heights["weights"]
    assert heights["late"] != heights["end"]


def test_the_page_stands_on_its_own_and_takes_its_colours_from_its_style(tmp_path: Path) -> None:
    page = write_timeline(layered_step(), tmp_path / "timeline.html").read_text(encoding="utf-8")
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "$" not in page
    assert not re.search(r'(?:src|href)="(?!#)', svg.replace("http://www.w3.org", ""))
    assert "<script" not in page
    assert "fill: var(--activations)" in svg
    assert "#a100" not in svg  # no stand-in colour is left
    assert "prefers-color-scheme: dark" in page


def test_a_long_step_makes_a_small_page(tmp_path: Path) -> None:
    path = write_timeline(layered_step(layers=5000), tmp_path / "timeline.html")
    assert path.stat().st_size < 300 * KIB


def test_the_same_events_make_the_same_page(tmp_path: Path) -> None:
    first = write_timeline(layered_step(), tmp_path / "a.html").read_bytes()
    assert write_timeline(layered_step(), tmp_path / "b.html").read_bytes() == first


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["matplotlib"] = None
from memfit.errors import MemfitError
from memfit.memory.components import Component
from memfit.memory.components import Event
from memfit.report.timeline import write_timeline
try:
    write_timeline([Event(0, 1, True, Component.WEIGHTS)], {str(tmp_path / "t.html")!r})
except MemfitError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'memfit[report]'" in done.stdout
    assert not (tmp_path / "t.html").exists()


def test_importing_the_timeline_imports_neither_matplotlib_nor_torch() -> None:
    code = "import sys, memfit.report.timeline; print({'matplotlib', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("budget", [None, 30 * MIB])
def test_events_of_nothing_but_weights_draw_too(tmp_path: Path, budget: int | None) -> None:
    events = [Event(n, 2 * MIB, True, WEIGHTS, "") for n in range(3)]
    page = write_timeline(events, tmp_path / "t.html", budget_bytes=budget).read_text()
    assert "tensors 6.0 MiB" in page
