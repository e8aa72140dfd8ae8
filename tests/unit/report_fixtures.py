"""A run's folder as a run would leave it, and a reader of the page made from it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from memfit.config.files import plain
from memfit.data import DataCounts, LabelSpace, LengthBin, LengthSummary
from memfit.memory.components import Component, MemoryPeak
from memfit.records.evaluation import evaluate_predictions, worst_mistakes
from memfit.records.results import (
    MemorySummary,
    RunSummary,
    versions,
    write_evaluation,
    write_summary,
)
from memfit.records.run_log import RunLog
from memfit.units import MIB

EVIL = "<script>alert(1)</script>\"'&\x00\x1b[2J\u202eabc\u2066"
ACTING = {"\x00", "\x1b", "\u202e", "\u2066"}
VOID = {"meta", "br", "link"}
PEAK = MemoryPeak(
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


class Page(HTMLParser):
    """Text, tags and attributes; fails on tags that do not close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.scripts: list[str] = []
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
        if tag in ("td", "th", "li", "option"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text += data

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join(self.text.split())

    def values(self, tag: str, name: str) -> list[str]:
        """One attribute of all such tags."""
        return [value for found, key, value in self.attributes if (found, key) == (tag, name)]


def make_run(folder: Path, names: tuple[str, ...] = ("負評", "正評"), **changes: Any) -> Path:
    """Everything a finished run leaves that the report reads."""
    space, rows = LabelSpace("single_label", names), 4 * len(names)
    labels = np.arange(rows) % len(names)
    logits = np.eye(len(names))[np.where(np.arange(rows) % 4 == 1, 0, labels)]
    result = evaluate_predictions(logits, labels, space)
    texts = [f"房間很乾淨 {row} {EVIL}" for row in range(rows)]
    write_evaluation(folder, result, worst_mistakes(logits, labels, space, texts))
    values: dict[str, Any] = {
        "model": "hfl/rbt3",
        "task": "single_label",
        "labels": names,
        "metrics": result.metrics,
        "averaging": result.averaging,
        "positive": result.positive,
        "training": {
            "steps": 438,
            "epochs": 2.0,
            "effective_batch": 16,
            "learning_rate": 2e-5,
            "bf16": True,
        },
        "data": plain(_counts(names)),
        "lengths": plain(_lengths()),
        "seconds": {"train": 200.0, "total": 250.0},
        "memory": MemorySummary(4 * 10**9, PEAK, PEAK),
        "device": "RTX 3060",
        "versions": versions(),
        "finished_at": "2025-01-02T03:04:05",
    }
    write_summary(folder, RunSummary(**{**values, **changes}))
    history: list[dict[str, float]] = [
        {
            "step": step,
            "epoch": step / 20,
            "loss": 1 / step,
            "grad_norm": 2.0,
            "learning_rate": 1e-5,
        }
        for step in range(1, 40)
    ]
    history += [{"step": 20, "eval_loss": 0.4, "eval_f1": 0.9, "eval_runtime": 3.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


def _counts(names: tuple[str, ...]) -> DataCounts:
    return DataCounts(
        rows_read=101,
        dropped_no_text=1,
        dropped_no_label=0,
        train_rows=90,
        validation_rows=10,
        duplicates_across_split=2,
        train_class_counts=dict.fromkeys(names, 45),
        validation_class_counts=dict.fromkeys(names, 5),
    )


def _lengths() -> LengthSummary:
    return LengthSummary(
        count=100, mean=70.0, p50=66, p90=120, p99=300, max=1234, max_length=128, cut_rows=9,
        histogram=tuple(LengthBin(16 * n, 16 * n + 15, 10 - n) for n in range(10)),
    )  # fmt: skip


def add_samples(folder: Path, steps: int = 40, **begun: Any) -> RunLog:
    """The log of a run on a card, up to a step; nothing says how it ended."""
    log = RunLog(folder)
    summary = RunSummary(
        model="hfl/rbt3", task="single_label", status="running", device="RTX 3060",
        training={"steps": 0}, memory=MemorySummary(4 * 10**9, PEAK),
    )  # fmt: skip
    log.write(**{"begun": summary, "step": 0, "max_steps": 438, "seconds": 0.0, **begun})
    for step in range(1, steps + 1):
        now_bytes = (1000 + step) * MIB
        log.write(step=step, seconds=0.5 * step, now_bytes=now_bytes, peak_bytes=1700 * MIB)
        log.write(logged={"step": step, "loss": 1 / step, "learning_rate": 1e-5})
    return log


PLAN = """
version = 1
fidelity = "rounding"
[micro_batching]
max_tokens = 2048
[strategies]
packing = {}
checkpointing = {layers = 9, part = "layer"}
[predicted]
device_peak_bytes = 2306867200
step_seconds = 0.063
[reasons]
packing = "texts are packed"
checkpointing = "recomputes 9 of 24 layers: saves 1.1 GiB"
memory = "peaks at 2.1 GiB"
"""
