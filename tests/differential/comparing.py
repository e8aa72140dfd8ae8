"""What differs between the stock Trainer's training and ours."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor

from differential.cases import Case
from differential.explained import OUR_FILES, TIMES, values_differ_by_design
from differential.models import model_of
from differential.training import Seen, Training
from memfit import BudgetTrainer
from memfit.strategies import Fidelity

# Largest difference of a number that is logged, as a share of it.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 2e-5
# With fewer bits, and with optimizers that divide by the gradient: what is zero on paper is then a
# step of rounding.
ROUNDED_LOSS, ROUNDED_NORM = 5e-2, 5e-2
# By how much of the labels' standard deviation, which is 1, fewer bits move a regression's root
# mean square error. Its loss is the square: where answers are near their labels, little moves it
# by a large share. The stock Trainer in float32 moves as far when its weights are rounded once
# before it starts (seed 4830: a loss of 0.23 by 11 %, 0.026 of the root; 2171: 0.04).
ROUNDED_ANSWERS = 4e-2
DIVIDED = 100
ANSWERS = 2e-2
LOSSES = ("loss", "eval_loss", "train_loss")
PLAIN_OPTIMIZERS = ("sgd", "given", "counting")
# Distance of weights after plain SGD: as a share of how far they moved, and of themselves, which
# is what float32 leaves where they hardly move.
WEIGHT_TOLERANCE, WEIGHT_ROUNDING = 2e-5, 2e-7


def check(case: Case) -> None:
    """AssertionError with the script of the case where the two trainings differ."""
    found = differences(case)
    if found:
        lines = "\n".join(f"  - {one}" for one in found)
        raise AssertionError(f"{lines}\n\nIt is reproduced by:\n\n{case.script()}")


def differences(case: Case) -> list[str]:
    """Every difference that is not explained, in words."""
    with _few_collections():
        return _differences(case)


_cases_run = itertools.count(1)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Every Trainer collects garbage among all objects of torch: two thirds of a case's time."""
    collect = gc.collect
    with mock.patch.object(gc, "collect", return_value=0):
        yield
    if next(_cases_run) % 25 == 0:
        collect()


def _differences(case: Case) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="differential-"))
    try:
        try:
            ours = Training(case, BudgetTrainer, folder / "ours", None).run()
            error = ""
        except Exception as raised:
            ours, error = Seen(), _said(raised)
        reference = Training(case, transformers.Trainer, folder / "stock", ours)
        try:
            stock = reference.run()
        except Exception as raised:
            return [f"the stock Trainer fails: {_said(raised)}"]
        if error:
            return [f"BudgetTrainer fails: {error}"]
        return list(_compared(case, ours, stock))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _said(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(frames)), "")
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''} ({where})"


def _compared(case: Case, ours: Seen, stock: Seen) -> Iterator[str]:
    if ours.events != stock.events:
        yield f"callbacks are told {ours.events}, the stock Trainer's {stock.events}"
    values = not values_differ_by_design(case, ours)
    yield from _states(ours.state, stock.state, values=values)
    yield from _noise(ours.noise, stock.noise)
    yield from _returned(case, ours, stock, values=values)
    yield from _logs(case, ours, stock, values=values)
    if "lora" not in ours.strategies:  # an adapter's files have other names
        # Which checkpoint is the best, and so is kept, is by the values.
        yield from _files(ours, stock, steps=values or not case.best or case.limit is None)
    yield from _predictions(case, ours, stock, values=values)
    if not values:
        return
    exact = ours.fidelity is Fidelity.EXACT
    if exact and case.optim in PLAIN_OPTIMIZERS:
        yield from _weights(case, ours, stock)
    if exact and not ours.sink and case.callback == "gradients":
        for step, (mine, theirs) in enumerate(zip(ours.gradients, stock.gradients, strict=True), 1):
            if not _near(mine, theirs, _tolerance(case, ours, "grad_norm")):
                yield f"a callback sees a gradient of {mine} before update {step}, not {theirs}"


def _tolerance(case: Case, ours: Seen, name: str, loss: float | None = None) -> float:
    """How far a number of this name may be off, beside a loss of this size."""
    is_norm = name == "grad_norm"
    if ours.fidelity is Fidelity.ROUNDING:
        bound = ROUNDED_NORM if is_norm else ROUNDED_LOSS
        if case.task != "regression" or not loss:
            return bound
        error = ROUNDED_ANSWERS / math.sqrt(loss)
        return max(bound, error if is_norm else 2 * error + error**2)
    if name in ("eval_spread", "predictions") and case.optim not in PLAIN_OPTIMIZERS:
        # A bias that all answers share has no gradient on paper: it is moved by rounding alone.
        return math.inf if case.task in ("choice", "question") else ANSWERS
    bound = NORM_TOLERANCE if is_norm else LOSS_TOLERANCE
    return bound if case.optim in PLAIN_OPTIMIZERS else DIVIDED * bound


def _returned(case: Case, ours: Seen, stock: Seen, *, values: bool) -> Iterator[str]:
    if ours.apart and "lora" not in ours.strategies:
        yield "the model that was given is not the one that was trained"
    if ours.no_json and not stock.no_json:
        yield f"trainer_state.json is no valid JSON in {ours.no_json}"
    if ours.returned is None or stock.returned is None:
        return
    (steps, loss, names), (their_steps, their_loss, their_names) = ours.returned, stock.returned
    if (steps, names) != (their_steps, their_names):
        yield f"train() returns {steps}, {sorted(names)}, not {their_steps}, {sorted(their_names)}"
    if values and not _near(loss, their_loss, _tolerance(case, ours, "loss", their_loss)):
        yield f"train() returns a loss of {loss}, not {their_loss}"


def _noise(ours: list[float], stock: list[float]) -> Iterator[str]:
    if stock:
        share = np.mean(ours) / np.mean(stock) if ours else 0.0
        if not 0.85 <= share <= 1.15:
            yield f"NEFTune's noise is {share:.2f} times what was asked for"


def _states(ours: dict[str, Any], stock: dict[str, Any], *, values: bool) -> Iterator[str]:
    for name, value in stock.items():
        if name in ("total_flos", "best_metric", "best_global_step") and not values:
            continue
        mine = ours[name]
        same = _near(mine, value, 1e-2) if isinstance(value, float) else mine == value
        if not same:
            yield f"state.{name} is {mine}, not {value}"


def _logs(case: Case, ours: Seen, stock: Seen, *, values: bool) -> Iterator[str]:
    if len(ours.logs) != len(stock.logs):
        yield f"{len(ours.logs)} entries in the log, not {len(stock.logs)}"
        return
    for mine, theirs in zip(ours.logs, stock.logs, strict=True):
        if mine.keys() != theirs.keys():
            yield f"an entry of the log has {sorted(mine)}, not {sorted(theirs)}"
            continue
        loss = next((theirs[name] for name in LOSSES if name in theirs), None)
        for name in sorted(theirs.keys() - TIMES):
            counted = name in ("step", "learning_rate", "epoch")
            tolerance = 1e-9 if counted else _tolerance(case, ours, name, loss)
            if (counted or values) and not _near(mine[name], theirs[name], tolerance):
                yield f"step {theirs['step']}: {name} is {mine[name]}, not {theirs[name]}"


def _files(ours: Seen, stock: Seen, *, steps: bool) -> Iterator[str]:
    """Names that are missing or added; without `steps` the checkpoints' numbers do not count."""
    mine, theirs = (
        {name if steps else re.sub(r"checkpoint-\d+", "checkpoint", name) for name in seen.files}
        for seen in (ours, stock)
    )
    mine = {name for name in mine if Path(name).name not in OUR_FILES}
    if missing := sorted(theirs - mine):
        yield f"files are missing: {missing}"
    if added := sorted(mine - theirs):
        yield f"files are added: {added}"


def _predictions(case: Case, ours: Seen, stock: Seen, *, values: bool) -> Iterator[str]:
    mine, theirs = _shapes(ours.predicted), _shapes(stock.predicted)
    if mine != theirs and "truncation" not in ours.strategies:
        yield f"predictions are of shapes {mine}, not {theirs}"
    elif mine == theirs and values and stock.predicted is not None:
        tolerance = _tolerance(case, ours, "predictions")
        pairs = zip(_arrays(ours.predicted), _arrays(stock.predicted), strict=True)
        for index, (found, expected) in enumerate(pairs):
            scale = float(np.abs(expected).max(initial=1e-3))
            apart = float(np.abs(found - expected).max(initial=0.0)) / scale
            if not apart <= 10 * tolerance:
                yield f"array {index} of the predictions is {apart:.1e} of its largest value off"
    if ours.metrics.keys() != stock.metrics.keys():
        yield f"predict's metrics are {sorted(ours.metrics)}, not {sorted(stock.metrics)}"


def _weights(case: Case, ours: Seen, stock: Seen) -> Iterator[str]:
    if ours.weights.keys() != stock.weights.keys():
        yield f"other weights: {sorted(ours.weights.keys() ^ stock.weights.keys())}"
        return
    before = model_of(case.task, case.family, case.head, wide=case.wide).state_dict()
    apart, moved = _distance(ours.weights, stock.weights), _distance(stock.weights, before)
    whole = math.sqrt(sum(float(v.double().pow(2).sum()) for v in stock.weights.values()))
    if not apart <= WEIGHT_TOLERANCE * moved + WEIGHT_ROUNDING * whole:
        yield f"the weights are {apart:.2e} apart after moving {moved:.2e}"


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(
        sum(float((value - other[name]).double().pow(2).sum()) for name, value in one.items())
    )


def _near(mine: Any, theirs: Any, tolerance: float) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if isinstance(theirs, str):
        return bool(mine == theirs)
    mine, theirs = float(mine), float(theirs)
    if math.isnan(theirs):
        return math.isnan(mine)
    return abs(mine - theirs) <= tolerance * max(abs(theirs), 1e-2)


def _shapes(value: Any) -> Any:
    if isinstance(value, np.ndarray | torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: _shapes(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_shapes(part) for part in value)
    return value if value is None else type(value).__name__


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray):
        yield value.astype(np.float64)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _arrays(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _arrays(part)
