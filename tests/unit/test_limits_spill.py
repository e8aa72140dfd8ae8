"""Windows' counter of memory that was moved to the host: read as documented, and judged."""

# ruff: noqa: N802 - the names are those of the library.
from __future__ import annotations

import ctypes
from typing import Any

import pytest

from memfit.training.limits import SharedUsage, SpillWatch, reader_for
from memfit.units import MIB


class Pdh:
    """pdh.dll as its documentation describes it, with two adapters."""

    def __init__(self, *, counter: bool = True) -> None:
        self.paths: list[str] = []
        self.values = [300 * MIB, 20 * MIB]
        self._counter = counter

    def PdhOpenQueryW(self, _source: Any, _data: int, query: Any) -> int:
        query._obj.value = 1
        return 0

    def PdhAddEnglishCounterW(self, _query: Any, path: str, _data: int, counter: Any) -> int:
        self.paths.append(path)
        counter._obj.value = 2
        return 0 if self._counter else 0xC0000BB8  # PDH_CSTATUS_NO_OBJECT

    def PdhCollectQueryData(self, _query: Any) -> int:
        return 0

    def PdhGetFormattedCounterArrayW(
        self, _counter: Any, form: int, size: Any, count: Any, buffer: Any
    ) -> int:
        class Item(ctypes.Structure):
            _fields_ = (
                ("name", ctypes.c_wchar_p), ("status", ctypes.c_uint32), ("value", ctypes.c_int64),
            )  # fmt: skip

        assert form == 0x400
        count._obj.value = len(self.values)
        if buffer is None:
            size._obj.value = ctypes.sizeof(Item) * len(self.values)
            return ctypes.c_int32(0x800007D2).value  # PDH_MORE_DATA, as a signed number
        items = (Item * len(self.values))(*[("pid_7", 0, value) for value in self.values])
        ctypes.memmove(buffer, items, ctypes.sizeof(items))
        return 0


def test_the_counter_of_this_process_is_summed_over_its_adapters():
    pdh = Pdh()
    usage = SharedUsage(pdh, pid=7)
    assert usage() == 320 * MIB
    assert pdh.paths == [r"\GPU Process Memory(pid_7_*)\Shared Usage"]
    pdh.values = []
    assert usage() == 0


def test_a_windows_without_the_counter_is_a_windows_that_says_nothing():
    assert SharedUsage(Pdh(counter=False), pid=7)() is None


def test_elsewhere_there_is_nothing_to_read():
    assert reader_for("linux")() is None
    assert SpillWatch(reader_for("linux")).spilled_bytes() == 0


@pytest.mark.parametrize(("grown_mib", "spilled_mib"), [(10, 0), (60, 0), (500, 500)])
def test_only_what_comes_on_top_of_the_beginning_is_a_spill(grown_mib, spilled_mib):
    shared = {"bytes": 300 * MIB}
    watch = SpillWatch(lambda: shared["bytes"])
    assert watch.spilled_bytes() == 0
    shared["bytes"] += grown_mib * MIB
    assert watch.spilled_bytes() == spilled_mib * MIB


def test_pinned_memory_is_shared_and_no_spill():
    held = {"spilled": 0, "pinned": 100 * MIB}
    watch = SpillWatch(lambda: 300 * MIB + sum(held.values()), lambda: held["pinned"])
    assert watch.spilled_bytes() == 0
    held["pinned"] += 500 * MIB
    assert watch.spilled_bytes() == 0
    held["spilled"] += 200 * MIB
    assert watch.spilled_bytes() == 200 * MIB
