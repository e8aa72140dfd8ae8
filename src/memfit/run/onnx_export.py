"""A run's classifier as ONNX, scored on its validation rows before it is handed over.

Every variant answers the same rows as torch does, in the same process: its size, its time, its
metric and how many answers changed are known before a file gets its name. A variant that loses more
than `most_lost` points is not written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memfit.config import DataConfig, RunConfig
from memfit.config.files import staged_files, write_json
from memfit.data import read_labelled, read_table
from memfit.errors import ConfigError, DataError, MemfitError, ModelError, OutputError
from memfit.i18n import t
from memfit.models.onnx_model import (
    ONNX_FILES,
    SCHEMES,
    OnnxModel,
    export_onnx,
    quantize,
    require_onnx,
)
from memfit.records.evaluation import evaluate_predictions, probabilities
from memfit.records.export_results import Export, Variant
from memfit.records.results import RunFolder
from memfit.records.scoring import Array, answers, scoring_for
from memfit.report.page import write_report
from memfit.run.inference import Classifier, Text
from memfit.waiting import doing

MOST_LOST = 0.5
"""Points of the headline metric that a variant may lose."""

MOST_LOGITS_OFF = 1e-3
"""What the float32 graph may differ from torch by."""

_ALONE_ROWS, _ALONE_SECONDS = 200, 4.0
"""Texts that are answered one by one to time them, and how long that may take."""

_BESIDE = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model",
    "added_tokens.json", "chat_template.jinja", "summary.json",
)  # fmt: skip
"""What a folder needs beside onnx/ for others' loaders, and for memfit's own."""


def export(
    run: str | Path,
    *,
    to: str = "onnx",
    int8: bool = False,
    output: str | Path | None = None,
    data: str | None = None,
    most_lost: float = MOST_LOST,
    **options: Any,
) -> Export:
    """Exports a finished run, or any trained classifier with `data` to score it on.

    `options` are fields of DataConfig for `data`: the columns, the label names, the encoding.
    """
    if to != "onnx":
        raise ConfigError("--to is {to}; there is onnx", to=repr(to))
    require_onnx("onnx", "onnxscript", "onnxruntime")
    if output is None and not Path(run).is_dir():
        raise OutputError("{run} is no folder; say with --output where to write", run=run)
    target = Path(run if output is None else output).expanduser().absolute()
    classifier = Classifier.load(run, device="cpu", dtype="float32")
    texts, labels, scored_on = _rows_to_score(classifier, Path(run), data, options)
    judge = _Judge(classifier, texts, labels)
    model: Any = classifier.model
    target.mkdir(parents=True, exist_ok=True)
    with staged_files(target) as scratch:
        with doing(t("measuring torch …")):
            size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
            measured = [judge.measure("torch", classifier, size_bytes)]
        fp32 = scratch / ONNX_FILES["onnx"]
        with doing(t("exporting …")):
            export_onnx(model, _input_names(classifier), fp32)
        with doing(t("measuring the ONNX file …")):
            measured.append(judge.measure_file("onnx", fp32))
        if measured[-1].logits_off > MOST_LOGITS_OFF:
            raise ModelError(
                "the exported model differs from torch by {off} in its logits ({most} are "
                "allowed), so nothing was written; this is a fault of the exporter for {kind}",
                off=f"{measured[-1].logits_off:.2g}",
                most=MOST_LOGITS_OFF,
                kind=type(model).__name__,
            )
        refused = ""
        if int8:
            found = _quantized(judge, fp32, scratch / ONNX_FILES["onnx-int8"], most_lost)
            measured.append(found)
            if not found.file:
                refused = t(
                    "int8 was not written: it loses {lost} points of {metric}, and {most} are "
                    "allowed; allow more with --most-lost",
                    lost=f"{found.lost_points:.2f}",
                    metric=judge.metric,
                    most=f"{most_lost:g}",
                )
        made = Export(
            folder=target,
            metric=judge.metric,
            rows=len(labels),
            scored_on=scored_on,
            variants=tuple(measured),
            refused=refused,
            versions=_versions(),
        )
        _finish(made, scratch, Path(run))
    if RunFolder(target).report.is_file():
        write_report(target)
    return made


def _quantized(judge: _Judge, fp32: Path, target: Path, most_lost: float) -> Variant:
    """Tries the schemes in turn; returns the first that loses little, or else the best."""
    tried: list[Variant] = []
    for scheme in SCHEMES:
        with doing(t("quantizing {scheme} …", scheme=scheme)):
            quantize(fp32, target, scheme)
            variant = replace(judge.measure_file("onnx-int8", target), scheme=scheme)
        if variant.lost_points <= most_lost:
            return variant
        tried.append(variant)
    target.unlink()
    return replace(min(tried, key=lambda one: one.lost_points), file="")


class _Judge:
    """Answers the rows by every variant and compares with torch."""

    def __init__(self, classifier: Classifier, texts: Sequence[Text], labels: Array) -> None:
        self._classifier, self._texts, self._labels = classifier, texts, labels
        self._rules = classifier.scoring or scoring_for(classifier.labels)
        # A threshold that was tuned once is kept: the same answers are compared.
        self._rules = replace(self._rules, tuned=False)
        self.metric = self._rules.leads
        self._torch: tuple[Array, float] | None = None

    def measure_file(self, name: str, file: Path) -> Variant:
        """Measures an ONNX file."""
        model: Any = OnnxModel(file, self._classifier.model.config)
        beside = file.with_name(file.name + ".data")
        size_bytes = sum(one.stat().st_size for one in (file, beside) if one.is_file())
        measured = self.measure(name, replace(self._classifier, model=model), size_bytes)
        return replace(measured, file=ONNX_FILES[name])

    def measure(self, name: str, classifier: Classifier, size_bytes: int) -> Variant:
        """Answers all rows in batches, and some alone."""
        classifier.logits(self._texts[:8], progress=False)  # the first call allocates
        began = time.perf_counter()
        logits = classifier.logits(self._texts, progress=False)
        batched_seconds = (time.perf_counter() - began) / len(self._texts)
        scored = evaluate_predictions(logits, self._labels, classifier.labels, self._rules).metrics[
            self.metric
        ]
        if self._torch is None:
            self._torch = logits, scored
        reference, best = self._torch
        return Variant(
            name=name,
            size_bytes=size_bytes,
            alone_milliseconds=1000 * _seconds_alone(classifier, self._texts),
            batched_milliseconds=1000 * batched_seconds,
            metric=float(scored),
            changed_answers=self._changed(reference, logits),
            logits_off=float(np.abs(logits - reference).max()),
            lost_points=_lost_points(float(best), float(scored), classifier.labels.task),
        )

    def _changed(self, before: Array, after: Array) -> int:
        space = self._classifier.labels
        if space.task == "regression":  # as a person reads them: three digits
            return int((np.round(before, 3) != np.round(after, 3)).any(axis=1).sum())
        said = [answers(probabilities(one, space.task), space, self._rules)
                for one in (before, after)]  # fmt: skip
        differ = np.asarray(said[0] != said[1]).reshape(len(before), -1)
        return int(differ.any(axis=1).sum())


def _lost_points(best: float, scored: float, task: str) -> float:
    """Returns points of F1, or by how many percent the error of a regression grew."""
    if task == "regression":
        return 100 * (scored - best) / max(best, 1e-12)
    return 100 * (best - scored)


def _seconds_alone(classifier: Classifier, texts: Sequence[Text]) -> float:
    """Returns the median time of one text."""
    taken: list[float] = []
    ends = time.perf_counter() + _ALONE_SECONDS
    for text in texts[:_ALONE_ROWS]:
        began = time.perf_counter()
        classifier.logits([text], progress=False)
        taken.append(time.perf_counter() - began)
        if began > ends:
            break
    return float(np.median(taken))


def _input_names(classifier: Classifier) -> tuple[str, ...]:
    """Returns the inputs that the tokenizer makes of a text, which are those of the graph."""
    return tuple(classifier.tokenizer("a"))


def _rows_to_score(
    classifier: Classifier, run: Path, data: str | None, options: Mapping[str, Any]
) -> tuple[list[Text], Array, str]:
    """Returns texts, labels and where they come from: `data`, or the run's validation rows.

    The rows are made again from the run's table, seed and split.
    """
    if data is not None:
        config = DataConfig.build(path=data, **options)
        with doing(t("reading the table …")):
            table, _ = read_labelled(config, classifier.labels)
        scored_on = data
    else:
        if options:
            raise ConfigError("{option} goes with --data", option=next(iter(options)))
        if not RunFolder(run).config.is_file():
            raise DataError(
                "{run} has no run.toml, so its validation rows are not known; give a labelled "
                "table with --data",
                run=run,
            )
        config = RunConfig.build(RunFolder(run).config).data
        try:
            with doing(t("reading the table …")):
                table = read_table(config).validation
        except MemfitError as error:
            raise DataError(
                "the run's own table cannot be read again ({reason}); give a labelled table "
                "with --data",
                reason=error,
            ) from None
        scored_on = t("the run's validation rows")
    texts: list[Text] = list(table["text"])
    if "text_pair" in table.column_names:
        texts = list(zip(table["text"], table["text_pair"], strict=True))
    return texts, np.asarray(table["label"][:]), scored_on


def _finish(made: Export, scratch: Path, run: Path) -> None:
    """Adds what others' loaders need; an int8 file of before does not outlive a refusal."""
    if not (scratch / ONNX_FILES["onnx-int8"]).is_file():
        (made.folder / ONNX_FILES["onnx-int8"]).unlink(missing_ok=True)
    if run.is_dir() and made.folder != run.expanduser().absolute():
        for name in _BESIDE:
            if (run / name).is_file():
                shutil.copyfile(run / name, scratch / name)
    write_json(scratch / "export.json", made.to_dict())


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
    return {name: version(name) for name in names}
