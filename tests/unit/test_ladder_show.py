"""What the ladder says: the table, the Markdown, and which rungs cost quality."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from memfit.config import RunConfig
from memfit.i18n import speaking
from memfit.ladders import show
from memfit.ladders.rungs import (
    DOES_NOT_FIT,
    FAILED,
    FIDELITIES,
    NAMES,
    NOT_RUN,
    OK,
    Ladder,
    Rung,
    RungOutcome,
    classic_rungs,
    plan_rungs,
)
from memfit.memory.components import Component, MemoryPeak
from memfit.units import GIB, MIB

CONFIG = RunConfig.build(data="reviews.csv", model="hfl/chinese-macbert-large")
SCORES = {
    "baseline": {1: 0.916, 2: 0.920},
    "accumulation": {1: 0.917, 2: 0.919},
    "frozen": {1: 0.799, 2: 0.801},
    "tuned": {1: 0.915, 2: 0.917},
}


def peak(size: int) -> MemoryPeak:
    parts = {Component.WEIGHTS: size // 4, Component.ACTIVATIONS: size // 2}
    return MemoryPeak(parts, size * 3 // 4, size, size)


def outcome(rung: Rung, **changes: Any) -> RungOutcome:
    values: dict[str, Any] = {
        "rung": rung, "status": OK, "fidelity": rung.fidelity or "rounding",
        "predicted": peak(4 * GIB), "measured": peak(4 * GIB + 20 * MIB),
        "step_seconds": (1.0, 2.0, 60.0), "steps_per_epoch": 219,
    }  # fmt: skip
    return RungOutcome(**{**values, **changes})


def ladder(scores: Mapping[str, Mapping[int, float]] | None = None, **changes: Any) -> Ladder:
    made = [outcome(one) for one in classic_rungs(CONFIG)]
    made[1] = dataclasses.replace(made[1], step_seconds=(4.0,))
    made[3] = dataclasses.replace(
        made[3], status=DOES_NOT_FIT, measured=None, step_seconds=(), why="CUDA out of memory"
    )
    made[5] = dataclasses.replace(made[5], status=OK)
    plans = plan_rungs(["4GB", "half"], baseline_bytes=2 * GIB, card_bytes=None)
    made.append(outcome(plans[0], strategies=("packing", "half_precision")))
    made.append(outcome(plans[1], status=NOT_RUN, fidelity="", predicted=None, measured=None))
    given = scores or {}
    made = [dataclasses.replace(one, scores=given.get(one.rung.name, {})) for one in made]
    values: dict[str, Any] = {
        "model": "hfl/chinese-macbert-large", "data": "reviews.csv", "outcomes": tuple(made),
        "steps": 3, "device": {"type": "cpu", "name": "cpu"}, "rows": 6988, "epochs": 2.0,
        "seeds": 2,
    }  # fmt: skip
    return Ladder(**{**values, **changes})


def printed(what: RenderableType, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False).print(what)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def named(found: Ladder, name: str) -> RungOutcome:
    return next(one for one in found.outcomes if one.rung.name == name)


# ---- numbers ----


def test_an_epoch_is_the_median_step_times_its_steps_and_compared_with_the_baselines() -> None:
    found = ladder()
    assert found.baseline is not None
    assert found.baseline.epoch_seconds == 2.0 * 219
    assert found.slowdown(named(found, "accumulation")) == 2.0
    assert found.slowdown(named(found, "adafactor")) is None


def test_quality_is_lost_where_every_seed_is_worse_by_half_a_point_on_average() -> None:
    found = ladder(SCORES)
    frozen, tuned = named(found, "frozen"), named(found, "tuned")
    assert found.change(frozen) == pytest.approx(-11.8)
    assert found.loses(frozen)
    assert found.change(tuned) == pytest.approx(-0.2)
    assert not found.loses(tuned)
    assert not found.loses(named(found, "accumulation"))
    mixed = ladder({"baseline": {1: 0.9, 2: 0.8}, "frozen": {1: 0.7, 2: 0.81}})
    assert not mixed.loses(named(mixed, "frozen"))  # one seed is better
    assert (frozen.score, frozen.spread) == (pytest.approx(0.8), pytest.approx(0.002 / 2**0.5))


def test_an_error_is_better_when_it_is_smaller() -> None:
    found = ladder({"baseline": {1: 0.5}, "frozen": {1: 0.6}, "tuned": {1: 0.51}}, metric="mse")
    assert found.change(named(found, "frozen")) == pytest.approx(-0.2)
    assert found.loses(named(found, "frozen"))
    assert not found.loses(named(found, "tuned"))
    (said,) = [one for one in show.quality(found) if "COSTS QUALITY" in one]
    assert said == "COSTS QUALITY: + frozen encoder, MSE worse by 20% (0.600 against 0.500)."


def test_outcomes_survive_the_trip_through_json() -> None:
    found = ladder(SCORES)
    values = json.loads(json.dumps(found.as_json()))
    assert tuple(map(RungOutcome.from_json, values["outcomes"])) == found.outcomes
    by_name = {one["rung"]["name"]: one for one in values["outcomes"]}
    assert by_name["baseline"]["times_baseline"] == 1.0
    assert by_name["frozen"]["points_from_baseline"] == pytest.approx(-11.8)
    assert [by_name[name]["costs_quality"] for name in ("accumulation", "frozen", "shorter")] == [
        False, True, None,
    ]  # fmt: skip


# ---- sentences ----


def test_without_quality_measured_the_rungs_that_may_cost_it_are_named_with_the_reason() -> None:
    may, same = list(show.quality(ladder()))
    assert may.startswith("CHANGE WHAT IS LEARNT and may cost quality: + frozen encoder (fewer ")
    assert "+ length 32 (texts are cut)" in may
    assert "add --quality" in may
    assert "Adafactor" not in may  # it did not fit
    assert same.endswith("+ batch 1 × 32, + checkpointing, memfit in 4GB.")


def test_measured_losses_are_said_plainly_with_their_numbers() -> None:
    said = list(show.quality(ladder(SCORES)))
    assert said[0] == (
        "COSTS QUALITY: + frozen encoder, -11.8 points of F1 (0.800 ±0.001 against 0.918 ±0.003)."
    )
    assert said[1].startswith("CHANGE WHAT IS LEARNT and may cost quality: + length 32")
    assert said[2] == "No loss that 2 seeds can see: + batch 1 × 32, + head at 0.001."
    assert said[3].endswith("(same result up to rounding): + checkpointing, memfit in 4GB.")


def test_plans_reasons_and_what_the_numbers_are_is_said_below_the_table() -> None:
    said = "\n".join(show.sentences(ladder(budget_bytes=8 * 10**9)))
    assert "memfit in 4GB: packing" in said
    assert "+ Adafactor: CUDA out of memory" in said
    assert "extrapolated: the median of 3 timed steps × 219 steps" in said
    assert "held to 8.00 GB (7.45 GiB)" in said


# ---- the table, Markdown ----


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("scores", [None, SCORES])
def test_the_table_fits_80_columns_and_has_every_rung(
    language: str, scores: Mapping[str, Mapping[int, float]] | None
) -> None:
    with speaking(language):
        found = ladder(scores)
        lines = printed(show.table(found), width=80)
        names = [show.name_of(one.rung) for one in found.outcomes]
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    assert [name for name in names if name not in text] == []
    assert "…" not in text
    assert "4.02 GiB" in text
    assert ("0.800±.001" in text) is (scores is not None)
    row = next(line for line in lines if "Adafactor" in line)
    assert ("does not" if language == "en" else "放不下") in row


def test_the_markdown_holds_what_the_table_has_no_room_for_and_escapes_names() -> None:
    found = ladder(SCORES, model="org/a|b_<c>")
    text = show.markdown(found)
    assert text.startswith(r"# a\|b\_\<c\> on cpu, 6,988 rows")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == 2 + len(found.outcomes)
    (row,) = [row for row in rows if "+ frozen encoder" in row[0]]
    assert row[1:] == [
        "gradients, optimizer, activations", "4.00 GiB", "4.02 GiB", "-0.5%", "7 min 18 s",
        "1.00", "capacity", "0.800 ±0.001", "-11.80 |",
    ]  # fmt: skip
    failed = dataclasses.replace(found.outcomes[0], status=FAILED, measured=None, step_seconds=())
    assert "failed" in show.markdown(dataclasses.replace(found, outcomes=(failed,)))


def test_every_status_fidelity_and_rung_has_its_words() -> None:
    assert show._RUNGS.keys() == set(NAMES)
    assert show.FIDELITY_NAMES.keys() >= set(FIDELITIES)
    assert show.PARTS.keys() >= {part for one in classic_rungs(CONFIG) for part in one.targets}
    assert show._STATUSES.keys() == {DOES_NOT_FIT, FAILED, NOT_RUN}
    assert show._WHY.keys() >= set(FIDELITIES[2:])
