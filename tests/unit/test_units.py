import pytest

from memfit.errors import BudgetError
from memfit.units import (
    GIB,
    Budget,
    format_both,
    format_bytes,
    format_seconds,
    parse_budget,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * GIB),
        ("4G", 4 * 10**9),
        ("3.5 gb", 3_500_000_000),
        (" 512MiB ", 512 * 2**20),
        ("1000", 1000),
    ],
)
def test_sizes_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "four", "4XB", "-4GB", "0", "0%", "120%", "GB", "4,5GB"])
def test_a_budget_that_does_not_parse_names_what_was_written(text):
    with pytest.raises(BudgetError):
        parse_budget(text)


def test_a_budget_is_a_size_a_share_or_auto():
    assert parse_budget("4GB") == Budget(bytes=4 * 10**9)
    assert parse_budget("80%") == Budget(fraction=0.8)
    assert parse_budget("Auto") == Budget()


@pytest.mark.parametrize(
    ("given", "meant"), [("4", "4GB"), (" 3.5 ", "3.5GB"), (4, "4GB"), ("4000", "4000MB")]
)
def test_a_budget_without_a_unit_is_refused_with_what_was_meant(given, meant):
    with pytest.raises(BudgetError, match=f"did you mean {meant}"):
        parse_budget(given)
    assert parse_budget("4000000000") == parse_budget(4 * 10**9) == Budget(bytes=4 * 10**9)


def test_a_budget_beyond_the_device_is_cut_to_it():
    assert parse_budget("8GB").resolve(total_bytes=4 * GIB, free_bytes=GIB) == 4 * GIB


def test_auto_leaves_room_for_the_display():
    resolved = Budget().resolve(total_bytes=4 * GIB, free_bytes=3 * GIB)
    assert resolved == 3 * GIB - 256 * 2**20


def test_printing():
    assert format_bytes(4 * 10**9) == "3.73 GiB"
    assert format_bytes(100) == "100 B"
    assert format_both(4 * 10**9) == "4.00 GB (3.73 GiB)"
    assert format_both(10**7) == "0.01 GB (9.5 MiB)"
    assert format_both(10**6) == "976.6 KiB"
    assert format_seconds(200) == "3 min 20 s"
    assert format_seconds(7500) == "2 h 05 min"
    assert str(parse_budget("80%")) == "80% of the device"
    assert str(Budget()) == "auto"
