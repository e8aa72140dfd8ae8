"""NVML's answers read right: a stand-in for the driver's library, compiled here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memfit.memory import nvml

COMPILER = shutil.which("cc")
# The calls memfit makes, with NVML's own signatures; two cards, the second half full.
LIBRARY = r"""
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
static int cards[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    strncpy(text, "580.65.06", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13020; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index > 1) return 2; *device = &cards[index]; return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    strncpy(text, *(int *)device ? "Tesla T4" : "NVIDIA GeForce RTX 3060", length); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = *(int *)device ? 7 : 8; *minor = *(int *)device ? 5 : 6; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_t *memory) {
    if (memory->version != (sizeof(memory_t) | (2 << 24))) return 25;
    memory->total = *(int *)device ? 16000000000ULL : 12000000000ULL;
    memory->used = *(int *)device ? 8000000000ULL : 0; memory->reserved = 1000; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, void *t) {
    (void)d; (void)t; *n = 0; return FAILS; }
"""


def compiled(folder: Path, *flags: str) -> str:
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(LIBRARY)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, "-o", library, source], check=True)
    return str(library)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_the_driver_and_its_cards_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "_LIBRARIES", (compiled(tmp_path, "-DFAILS=0"),))
    found = nvml.driver()
    assert found == nvml.Driver(
        "580.65.06",
        (13, 2),
        (
            nvml.DriverCard("NVIDIA GeForce RTX 3060", (8, 6), 12_000_000_000, 0),
            nvml.DriverCard("Tesla T4", (7, 5), 16_000_000_000, 8_000_000_000),
        ),
    )


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_driver_that_keeps_no_books_of_processes_is_described_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "_LIBRARIES", (compiled(tmp_path, "-DFAILS=3"),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with nvml.open_device(0) as device:
        assert device is not None
        use = device.use()
    assert use == nvml.DeviceUse(16_000_000_000, 8_000_000_000, None)


def test_without_a_library_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_LIBRARIES", ("libnvidia-ml-that-is-not-there.so",))
    assert nvml.driver() is None
