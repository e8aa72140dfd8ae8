"""Where and when a figure was measured: the stamp every benchmark writes beside its numbers."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "triton", "torchao", "flashoptim", "datasets",
)  # fmt: skip


def stamp() -> dict[str, Any]:
    """Machine, versions and date; `gpu` is null on a machine without one."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "versions": versions(),
        "gpu": gpu(),
        "allocator_settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }


def versions() -> dict[str, str]:
    """The installed version of each package a figure may depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpu() -> dict[str, Any] | None:
    """The first CUDA device, without creating a context on it beyond what torch needs."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "total_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str:
    version = Path("/sys/module/nvidia/version")
    return version.read_text().strip() if version.is_file() else ""


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
