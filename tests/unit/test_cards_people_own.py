"""`memfit plan --gpu` for cards people own: a plan inside the card, or a clear no."""

from __future__ import annotations

import pytest
from planner_fixtures import bert, task

from memfit.memory.cards import CardPlace, find_card
from memfit.planner.advice import NothingFitsError
from memfit.planner.search import plan_for
from memfit.units import Budget
from traced_plans import used

OWNED = (
    "GTX 1050 Ti", "GTX 1650 4GB", "MX450", "RTX 2060 6GB", "RTX 3060 12GB", "RTX 5090 32GB",
    "P100",
)  # fmt: skip
LENGTHS = (64,) * 96
TINY = task(bert(2, 64, 100), lengths=(16,) * 8, per_device_train_batch_size=4)
SMALL, HUGE = task(bert(2, 64, 100), lengths=LENGTHS), task(bert(2, 12288), lengths=LENGTHS)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        *((name, False) for name in OWNED),
        *((name, True) for name in ("T4", "RTX 3060 12GB")),
    ],
)
def test_a_model_is_planned_inside_what_the_card_gives(name: str, windows: bool) -> None:
    card = find_card(name, CardPlace(windows=windows))
    asked = SMALL.placed(Budget(), card)
    assert asked.budget_bytes <= card.usable_bytes
    if windows:
        assert asked.budget_bytes <= 0.81 * card.total_bytes
    made = plan_for(asked, fresh=True, host_bytes_free=2**36)
    assert made.chosen.price is not None
    assert made.chosen.price.device_bytes <= asked.budget_bytes
    notes = [one.about for one in made.notes]
    assert notes == ["note.margin", "note.system"] if windows else ["note.margin"]
    low = used(made.chosen, "lowbit_adamw")
    assert low is None or low.dtype == ("bfloat16" if card.has_bf16 else "float16")


@pytest.mark.parametrize(
    ("name", "windows", "exact"),
    [
        ("P100", False, False),
        ("GTX 1050 Ti", False, True),
        ("GTX 1080 Ti", False, True),
        ("MX450", True, True),
        ("RTX 3060 12GB", True, True),
    ],
)
def test_without_triton_a_plan_is_traced_by_the_kernels_of_torch(
    name: str, windows: bool, exact: bool
) -> None:
    card = find_card(name, CardPlace(windows=windows))
    assert not card.has_triton
    asked = TINY.placed(Budget(), card, exact=exact)
    made = plan_for(asked, fresh=True, host_bytes_free=2**36)
    price = made.chosen.price
    assert price is not None
    assert card.context_bytes < price.device_bytes < card.context_bytes + 0.2e9
    assert "fused_layers" in made.left_out
    assert used(made.chosen, "packing") is not None
    low = used(made.chosen, "lowbit_adamw")
    assert (low is None) == exact
    assert low is None or low.dtype == "float16"


def test_a_model_that_no_plan_can_train_there_is_refused_with_its_size() -> None:
    card = find_card("GTX 1050 Ti")
    with pytest.raises(NothingFitsError, match="GB") as failure:
        plan_for(HUGE.placed(Budget(), card), fresh=True, host_bytes_free=2**32)
    assert failure.value.missing_bytes > 0
