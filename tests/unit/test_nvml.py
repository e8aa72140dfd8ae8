"""NVML's answers are read right: from a stand-in for pynvml, and by pynvml from a driver's."""

# ruff: noqa: N802 (the stand-in has pynvml's names)

from __future__ import annotations

import inspect
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from memfit.memory import nvml

GEFORCE = nvml.DriverCard("NVIDIA GeForce RTX 3060", (8, 6), 12_000_000_000, 0)
TESLA = nvml.DriverCard("Tesla T4", (7, 5), 16_000_000_000, 8_000_000_000)
KEPT_BY_DRIVER = 300_000_000
UUIDS = {"GPU-3060": GEFORCE, "GPU-4": TESLA, "MIG-4": TESLA}


class Pynvml:
    """pynvml's functions as memfit calls them, over two cards; a card is its own handle."""

    NVMLError = pynvml.NVMLError
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound
    nvmlMemory_v2 = pynvml.nvmlMemory_v2  # noqa: N815

    def __init__(self) -> None:
        self.running = 0
        self.processes: list[Any] = []

    def nvmlInit(self) -> None:
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13020

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> nvml.DriverCard:
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return (GEFORCE, TESLA)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> nvml.DriverCard:
        if uuid not in UUIDS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return UUIDS[uuid]

    def nvmlDeviceGetName(self, handle: nvml.DriverCard) -> str:
        return handle.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: nvml.DriverCard) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetMemoryInfo(self, handle: nvml.DriverCard, version: int | None = None) -> Any:
        kept_bytes = 0 if version == self.nvmlMemory_v2 else KEPT_BY_DRIVER
        free_bytes = handle.total_bytes - handle.used_bytes - KEPT_BY_DRIVER
        return SimpleNamespace(
            total=handle.total_bytes, used=handle.used_bytes + kept_bytes, free=free_bytes
        )

    def nvmlDeviceGetComputeRunningProcesses(self, handle: nvml.DriverCard) -> list[Any]:
        del handle
        return self.processes


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise pynvml.NVMLError(code)

    return fail


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Pynvml:
    stand_in = Pynvml()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return stand_in


def process(pid: int, used_bytes: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=used_bytes)


def use_of(index: int = 0) -> nvml.DeviceUse | None:
    with nvml.open_device(index) as device:
        return None if device is None else device.use()


def test_the_stand_in_has_pynvmls_names_and_parameters() -> None:
    for name, function in inspect.getmembers(Pynvml, inspect.isfunction):
        if name.startswith("nvml"):
            own = list(inspect.signature(function).parameters)[1:]
            assert own == list(inspect.signature(getattr(pynvml, name)).parameters), name


def test_the_driver_and_its_cards_are_described(driver: Pynvml) -> None:
    assert nvml.driver() == nvml.Driver("580.65.06", (13, 2), (GEFORCE, TESLA))
    assert driver.running == 0


def test_a_driver_older_than_the_second_memory_call_is_described_too(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = driver.nvmlDeviceGetMemoryInfo

    def old(handle: nvml.DriverCard, version: int | None = None) -> Any:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return first(handle)

    monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", old)
    found = nvml.driver()
    assert found is not None
    assert [card.used_bytes for card in found.cards] == [KEPT_BY_DRIVER, 8_300_000_000]


def test_a_name_that_is_not_text_hides_no_card(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "nvmlDeviceGetName", lambda _: b"\xf8T4".decode())
    found = nvml.driver()
    assert found is not None
    assert [card.name for card in found.cards] == ["\ufffdT4", "\ufffdT4"]


def test_own_memory_is_that_of_this_process(driver: Pynvml) -> None:
    driver.processes = [process(1, 5_000), process(os.getpid(), 7_000)]
    assert use_of() == nvml.DeviceUse(12_000_000_000, 0, 11_700_000_000, 7_000)
    driver.processes = [process(1, 5_000)]
    assert use_of() == nvml.DeviceUse(12_000_000_000, 0, 11_700_000_000, None)


@pytest.mark.parametrize(
    ("windows", "free_bytes"), [(True, 7_700_000_000), (False, 15_000_000_000)]
)
def test_under_windows_the_least_of_both_books_is_free(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch, windows: bool, free_bytes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (15_000_000_000, 16_000_000_000))
    monkeypatch.setattr(platform, "release", lambda: "6.6-microsoft-WSL2" if windows else "6.6")
    assert nvml.free_and_total_bytes(1) == (free_bytes, 16_000_000_000)
    assert driver.running == 0


def test_windows_books_no_memory_to_processes(driver: Pynvml) -> None:
    driver.processes = [process(os.getpid(), None)]
    assert use_of() == nvml.DeviceUse(12_000_000_000, 0, 11_700_000_000, None)


def test_a_driver_without_a_table_of_processes_still_tells_the_rest(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = failing(pynvml.NVML_ERROR_NOT_SUPPORTED)
    monkeypatch.setattr(driver, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert use_of(1) == nvml.DeviceUse(16_000_000_000, 8_000_000_000, 7_700_000_000, None)


@pytest.mark.parametrize(
    ("visible", "index", "card"),
    [
        ("", 1, TESLA), ("1", 0, TESLA), ("1, 0", 1, GEFORCE), ("GPU-4", 0, TESLA),
        ("GPU-3060,GPU-4", 1, TESLA), ("MIG-4", 0, TESLA), ("7", 0, None), ("GPU-9", 0, None),
    ],
)  # fmt: skip
def test_devices_are_numbered_as_torch_numbers_them(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch,
    visible: str, index: int, card: nvml.DriverCard | None,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    use = use_of(index)
    assert (None if use is None else use.total_bytes) == (
        None if card is None else card.total_bytes
    )
    assert driver.running == 0


@pytest.mark.parametrize(("begun", "card"), [(True, TESLA), (False, GEFORCE)])
def test_among_several_cards_torchs_own_is_found_by_its_uuid(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch, begun: bool, card: nvml.DriverCard
) -> None:
    """CUDA puts the fastest card first, here the one in the second slot."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    first = SimpleNamespace(uuid="4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: first)
    use = use_of(0)
    assert use is not None
    assert use.total_bytes == card.total_bytes
    assert driver.running == 0


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_without_a_driver_there_is_nothing_to_ask(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(driver, "nvmlInit", failing(code))
    assert nvml.driver() is None
    assert use_of() is None


def test_a_driver_that_fails_to_close_spoils_no_answer(
    driver: Pynvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "nvmlShutdown", failing(pynvml.NVML_ERROR_UNKNOWN))
    assert nvml.driver() is not None
    assert use_of() is not None


COMPILER = shutil.which("cc")
# NVML's own signatures; one card, whose processes are another one and whoever asks.
LIBRARY = r"""
#include <string.h>
#include <unistd.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process_t;
static int card;
int nvmlInitWithFlags(unsigned flags) { return flags; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    strncpy(text, "580.65.06", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13020; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index) return 2; *device = &card; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "GPU-4")) return 6; *device = &card; return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    strncpy(text, "Tesla T4", length); return device != &card; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = 7; *minor = 5; return device != &card; }
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_t *memory) {
    if (memory->version != (sizeof(memory_t) | (2 << 24))) return 25;
    memory->total = 16000000000ULL; memory->used = 8000000000ULL;
    memory->free = 7700000000ULL; return device != &card; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *table) {
    if (*count < 2) { *count = 2; return 7; }
    *count = 2; table[0].pid = 1; table[0].used = 5000;
    table[1].pid = getpid(); table[1].used = 7000; return device != &card; }
"""
QUESTIONS = """
from memfit.memory import nvml
print(nvml.driver())
with nvml.open_device() as device:
    print(device.use())
"""


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C compiler for Linux")
def test_pynvml_reads_the_tables_of_a_driver(tmp_path: Path) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(LIBRARY)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True)
    here = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "GPU-4"}
    command = [sys.executable, "-c", QUESTIONS]
    asked = subprocess.run(command, env=here, capture_output=True, text=True, check=True)
    assert asked.stdout.splitlines() == [
        str(nvml.Driver("580.65.06", (13, 2), (TESLA,))),
        str(nvml.DeviceUse(16_000_000_000, 8_000_000_000, 7_700_000_000, 7_000)),
    ]
