"""`memfit doctor`'s table of what a card can train, priced by the planner itself."""

from __future__ import annotations

import pytest

from memfit.doctor.reach import KnownModel, reaches
from memfit.memory.cards import find_card
from memfit.waiting import telling


def test_a_real_line_is_the_planners_own_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.waiting._TICK_SECONDS", 0.01)
    monkeypatch.setattr("memfit.waiting._LINE_AFTER_SECONDS", 0.0)
    tiny = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 512}  # fmt: skip
    models = [KnownModel("BERT-tiny", "prajjwal1/bert-tiny", "bert", tiny)]
    card = find_card("RTX 3050 4GB")
    with telling():
        (row,) = reaches(card, card.total_bytes, models=models)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pricing BERT-tiny (1 of 1) …\n")
    # 4.4 M parameters: the context is most of it.
    assert row.exact
    assert row.rounding
    for cell in (row.exact, row.rounding):
        assert cell.fits
        assert card.context_bytes < cell.device_bytes < card.context_bytes + 0.4e9
    assert row.rounding.texts_per_second >= row.exact.texts_per_second > 100
    assert row.allowed is None
