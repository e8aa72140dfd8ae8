"""Cards that are not here: their machine, the margin for what is not known of them."""

from __future__ import annotations

import pytest

from memfit.cli.options import check_card
from memfit.errors import BudgetError, ConfigError
from memfit.i18n import speaking
from memfit.memory.cards import CardPlace, find_card
from memfit.planner.explain import margin_note
from memfit.run.resume import stored_options

LINUX, WINDOWS = CardPlace(windows=False), CardPlace(windows=True)


def test_the_margin_for_what_is_not_known_is_said_with_its_size() -> None:
    card = find_card("GTX 1650", LINUX)
    (note,) = margin_note(card)
    assert card.margin_bytes == pytest.approx(0.387e9, rel=0.01)
    assert "0.39 GB are kept for what is not known" in note.sentence()
    assert "a context of 95 MB to 0.40 GB" in note.sentence()
    with speaking("zh"):
        assert "为未知部分留出 0.39 GB" in note.sentence()


def test_what_windows_or_a_display_holds_is_said() -> None:
    _, windows = margin_note(find_card("GTX 1650", WINDOWS))
    assert "0.78 GB of the card are left to Windows and its desktop" in windows.sentence()
    _, display = margin_note(find_card("GTX 1650", CardPlace(windows=False, display=True)))
    assert "0.60 GB of the card are left to others" in display.sentence()


def test_of_a_measured_card_nothing_is_kept() -> None:
    assert margin_note(find_card("H200", LINUX)) == []
    assert margin_note(None) == []


def test_the_machine_of_a_card_is_told_on_the_command_line() -> None:
    assert check_card("T4", True, False, "600MB") == CardPlace(True, False, 600 * 10**6)
    assert check_card("T4") is None


@pytest.mark.parametrize("gpu", [None, "cpu"])
def test_the_machine_here_is_measured_not_described(gpu: str | None) -> None:
    with pytest.raises(ConfigError, match="name the card with --gpu"):
        check_card(gpu, display=True)


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(BudgetError, match="as a size"):
        check_card("T4", reserved="some")


def test_a_plans_file_knows_the_machine_it_was_made_for() -> None:
    run = {"gpu": "T4", "place": {"windows": True, "display": False, "reserved_bytes": 7}}
    assert stored_options(run) == ({}, "T4", CardPlace(True, False, 7))
    assert stored_options({"gpu": "T4", "place": {"windows": "no"}})[2] == CardPlace()
    assert stored_options({})[1:] == (None, None)
