"""Measuring what this machine reaches: quick, cached, and in the time model's own units."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import psutil
import pytest
import torch

from memfit.config import files
from memfit.errors import ConfigError
from memfit.memory.cards import Speeds, this_card
from memfit.planner import step_time
from memfit.planner.step_time import _best, _products, calibrate

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without GPU")


def test_a_cpus_speeds_are_within_what_cpus_do() -> None:
    profile = calibrate("cpu")
    speeds = profile.reached
    assert speeds is not None
    assert all(value > 0 for value in dataclasses.asdict(speeds).values())
    assert 1e8 < speeds.fp32_flops < 1e14
    assert 1e8 < speeds.memory_bytes_per_second < 2e12
    assert 1e-7 < speeds.launch_seconds < 1e-2
    assert profile.fp32_flops == speeds.fp32_flops


def test_a_cpu_is_no_card() -> None:
    profile = calibrate("cpu")
    assert profile.capability == (0, 0)
    assert profile.context_bytes == 0
    assert profile.total_bytes == psutil.virtual_memory().total
    assert not profile.has_bf16


def test_it_is_measured_once_a_process() -> None:
    first = calibrate("cpu")
    started = time.perf_counter()
    assert calibrate(torch.device("cpu")) is first
    assert time.perf_counter() - started < 0.01


def test_the_best_of_a_few_short_runs_counts_and_long_ones_are_not_repeated() -> None:
    short = iter([5.0, 3.0, 4.0, 6.0])
    assert _best(lambda: next(short), 3) == 3.0

    runs = 0

    def long() -> float:
        nonlocal runs
        runs += 1
        time.sleep(0.25)
        return 1.0

    _best(long, 1000)
    assert runs == 1


def test_speeds_of_a_busy_machine_are_measured_again_when_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    rates = iter([1.0, 4.0])
    names = [one.name for one in dataclasses.fields(Speeds)]

    def measured(**_: bool) -> Speeds:
        return Speeds(**dict.fromkeys(names, next(rates)))

    monkeypatch.setattr(step_time, "_measure_cpu", measured)
    found = []
    for load in (8.0, 8.0, 0.0, 8.0):
        monkeypatch.setattr(psutil, "getloadavg", lambda load=load: (load * 64, 0.0, 0.0))
        used = files._used.set(True)
        found.append(step_time._speeds_of_cpu(in_half=True).fp32_flops)
        files._used.reset(used)
    assert found == [1.0, 1.0, 4.0, 4.0]


@without_gpu
def test_without_a_gpu_there_is_none_to_calibrate() -> None:
    assert this_card() is None
    with pytest.raises(ConfigError, match="no CUDA device"):
        calibrate("cuda")


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="not 'meta'"):
        calibrate("meta")


def test_how_products_are_rounded_is_as_before_afterwards() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with _products("tf32"):
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before
    assert not matmul.allow_tf32  # torch raises here where old and new flags disagree
