"""`memfit doctor`'s table of what a card can train, priced by the planner itself."""

from __future__ import annotations

import pytest

from memfit.doctor.reach import reaches, well_known
from memfit.memory.cards import find_card


def test_a_real_line_is_priced_from_traced_layers_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = [one for one in well_known() if one.name == "BERT-tiny"]
    said: list[str] = []
    card = find_card("RTX 3050 4GB")
    (row,) = reaches(card, card.total_bytes, models=models, say=said.append)
    assert said == ["pricing BERT-tiny (1 of 1)"]
    # 4.4 M parameters: the context is most of it.
    assert row.exact
    assert row.rounding
    for cell in (row.exact, row.rounding):
        assert cell.fits
        assert card.context_bytes < cell.device_bytes < card.context_bytes + 0.4e9
    assert row.rounding.texts_per_second >= row.exact.texts_per_second > 100
    assert row.allowed is None
    assert capsys.readouterr().out == ""
